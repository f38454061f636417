"""Whether a config's run fits on its devices: recipe.memory's estimates for the sizes that it names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from recipe import memory


def estimates(config: DictConfig) -> tuple[memory.Rollout, memory.Training, float] | None:
    """Rollout, training and the device's GiB; None for a CPU and where the model's config.json is not there."""
    device = config.trainer.device
    path = Path(config.actor_rollout_ref.model.path).expanduser() / "config.json"
    if device not in memory.DEVICE_GIB or not path.is_file():
        return None
    model = memory.Model.from_config(json.loads(path.read_text()))
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    longest = config.data.max_prompt_length + config.data.max_response_length
    generating = memory.rollout(
        model,
        rollout.tensor_model_parallel_size,
        rollout.expert_parallel_size,
        memory.DEVICE_GIB[device],
        rollout.gpu_memory_utilization,
        longest,
    )
    dies = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if actor.strategy == "megatron":
        names = ("tensor_model", "pipeline_model", "context", "expert_model")
        sizes = {name.split("_")[0]: actor.megatron[f"{name}_parallel_size"] for name in names}
        training = memory.megatron(model, dies, sizes, actor.ppo_max_token_len_per_gpu)
    else:
        training = memory.fsdp(model, dies, actor.ppo_max_token_len_per_gpu)
    return generating, training, memory.DEVICE_GIB[device]


def find_problems(config: DictConfig) -> Iterator[str]:
    if (found := estimates(config)) is None:
        return
    generating, training, device = found
    if generating.longest_responses < 1:
        yield (
            f"a die holds {generating.weights:.0f} GiB of weights and a KV cache of {generating.cache_tokens} tokens, "
            "less than one longest response: raise rollout.tensor_model_parallel_size or gpu_memory_utilization"
        )
    if training.total > device:
        yield (
            f"training needs about {training.total:.0f} GiB on each die of {device}: raise the parallel sizes of "
            "actor.megatron, or lower actor.ppo_max_token_len_per_gpu"
        )


def describe(config: DictConfig) -> str | None:
    """The estimates in two lines."""
    if (found := estimates(config)) is None:
        return None
    generating, training, device = found
    return (
        f"rollout, a die of {device} GiB: weights {generating.weights:.1f} GiB, KV cache {generating.cache:.1f} GiB = "
        f"{generating.cache_tokens:,} tokens = {generating.longest_responses:.1f} longest responses\n"
        f"training: weights {training.weights:.1f}, gradients {training.gradients:.1f}, optimizer "
        f"{training.optimizer:.1f}, activations {training.activations:.1f} GiB, in all {training.total:.1f}"
    )
