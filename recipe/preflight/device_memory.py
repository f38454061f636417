"""Whether a config's run fits on its devices: recipe.preflight.memory_model's estimates for the sizes that it names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from recipe.preflight import memory_model
from recipe.preflight.problem import Problem


def sizes_of(config: DictConfig) -> memory_model.Model | None:
    """The model's; None for a CPU and where its config.json is not there or has no sizes."""
    path = Path(config.actor_rollout_ref.model.path).expanduser() / "config.json"
    if config.trainer.device not in memory_model.DEVICE_GIB:
        return None
    try:
        return memory_model.Model.from_config(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError):
        return None


def uses_megatron(config: DictConfig) -> bool:
    """By the section that the choice of training composed: actor.strategy may be misspelt."""
    return "megatron" in config.actor_rollout_ref.actor


def checkpoint_gib(config: DictConfig) -> float:
    """Of one checkpoint with weights and optimizer; 0 where the model is not known."""
    if (model := sizes_of(config)) is None:
        return 0.0
    return memory_model.megatron_checkpoint(model) if uses_megatron(config) else memory_model.fsdp_checkpoint(model)


def offloaded_gib(config: DictConfig) -> float:
    """Of a machine's memory, for what its devices hand over between updates; 0 where the model is not known."""
    if (found := estimates(config)) is None:
        return 0.0
    actor, training = config.actor_rollout_ref.actor, found[1]
    settings = actor.megatron if uses_megatron(config) else actor.fsdp_config
    # FSDP's weights are a float32 share, as large as its gradients; Training.weights has the gathered layer too.
    weights = training.weights if uses_megatron(config) else training.gradients
    one = (weights if settings.param_offload else 0.0) + (training.optimizer if settings.optimizer_offload else 0.0)
    return one * config.trainer.n_gpus_per_node


def largest_tensor_mib(config: DictConfig) -> float:
    """The embedding as training hands it over: bf16 from Megatron, float32 from FSDP2. 0 where it is not known."""
    if (model := sizes_of(config)) is None:
        return 0.0
    size = memory_model.BF16 if uses_megatron(config) else memory_model.FP32
    return model.vocabulary * model.hidden * size / 2**20


def estimates(config: DictConfig) -> tuple[memory_model.Rollout, memory_model.Training, float] | None:
    """Rollout, training and the device's GiB; None where the sizes are not known."""
    if (model := sizes_of(config)) is None:
        return None
    device = config.trainer.device
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    longest = config.data.max_prompt_length + config.data.max_response_length
    generating = memory_model.rollout(
        model,
        rollout.tensor_model_parallel_size,
        rollout.expert_parallel_size,
        memory_model.DEVICE_GIB[device],
        rollout.gpu_memory_utilization,
        longest,
    )
    dies = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if uses_megatron(config):
        names = ("tensor_model", "pipeline_model", "context", "expert_model")
        sizes = {name.split("_")[0]: actor.megatron[f"{name}_parallel_size"] for name in names}
        training = memory_model.megatron(model, dies, sizes, actor.ppo_max_token_len_per_gpu)
    else:
        training = memory_model.fsdp(model, dies, actor.ppo_max_token_len_per_gpu)
    return generating, training, memory_model.DEVICE_GIB[device]


def find_problems(config: DictConfig) -> Iterator[Problem]:
    if (found := estimates(config)) is None:
        return
    generating, training, device = found
    if generating.longest_responses < 1:
        yield Problem(
            "memory.kv_cache",
            f"a die holds {generating.weights:.0f} GiB of weights and a KV cache of {generating.cache_tokens} tokens, "
            "less than one longest response: raise rollout.tensor_model_parallel_size or gpu_memory_utilization",
        )
    if training.total > device:
        is_megatron = uses_megatron(config)
        sizes = f"actor.{'megatron.*_parallel_size' if is_megatron else 'fsdp_config.ulysses_sequence_parallel_size'}"
        yield Problem(
            "memory.training",
            f"training needs about {training.total:.0f} GiB on each die of {device}: raise {sizes}, or lower "
            "actor.ppo_max_token_len_per_gpu",
        )


def describe(config: DictConfig) -> str | None:
    """The estimates in three lines."""
    if (found := estimates(config)) is None:
        return None
    generating, training, device = found
    return (
        f"rollout, a die of {device} GiB: weights {generating.weights:.1f} GiB, KV cache {generating.cache:.1f} GiB = "
        f"{generating.cache_tokens:,} tokens = {generating.longest_responses:.1f} longest responses\n"
        f"training: weights {training.weights:.1f}, gradients {training.gradients:.1f}, optimizer "
        f"{training.optimizer:.1f}, activations {training.activations:.1f} GiB, in all {training.total:.1f}\n"
        f"machine: {offloaded_gib(config):.0f} GiB of memory for what is offloaded; a checkpoint has "
        f"{checkpoint_gib(config):.0f} GiB"
    )
