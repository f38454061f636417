"""Whether a config's run fits on its devices, estimated from the model's config.json and the parallel sizes alone.

Communication buffers, fragmentation and CANN's or CUDA's own memory are not in the estimates. GiB are 2**30 bytes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig

from recipe.preflight.problem import Problem
from sam.trained_drafter import settings_of

GIB = 2**30
# Memory of one device, in GiB: an A3 die, an H100.
DEVICE_GIB = {"npu": 64, "cuda": 80}
BF16, FP32 = 2, 4
# Master weights and two moments in float32: Megatron's distributed optimizer, and what FSDP2 saves.
OPTIMIZER_BYTES = 3 * FP32


@dataclass(frozen=True)
class Model:
    """A Qwen3, dense or with experts: sizes, and the parameters of its parts over all layers."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    vocabulary: int
    experts: int
    embeddings: int
    attention: int  # and all else but the feed-forward part, routers included
    feed_forward: int

    @property
    def parameters(self) -> int:
        return self.embeddings + self.attention + self.feed_forward


class Estimates(NamedTuple):
    """Of one die: GiB of its own, of parts while generating and while updating with nothing offloaded that the update
    uses, the tokens that the KV cache holds, and whole responses at once."""

    device: int
    weights: float
    cache: float
    cache_tokens: int
    longest_responses: float
    training: dict[str, float]  # of weights, gradients, optimizer, activations


def model_of(config: DictConfig) -> Model | None:
    """Read config.json; None for a CPU and where it is not there or has no sizes."""
    if config.trainer.device not in DEVICE_GIB:
        return None
    found = settings_of(Path(config.actor_rollout_ref.model.path).expanduser())
    try:
        hidden, layers, vocabulary = found["hidden_size"], found["num_hidden_layers"], found["vocab_size"]
        heads, key_value_heads = found["num_attention_heads"], found["num_key_value_heads"]
        head_size, experts = found.get("head_dim") or hidden // heads, found.get("num_experts", 0)
        intermediate = found["moe_intermediate_size"] if experts else found["intermediate_size"]
        embeddings = vocabulary * hidden * (1 if found.get("tie_word_embeddings") else 2)
        attention = layers * hidden * (2 * head_size * (heads + key_value_heads) + experts + 2)
        feed_forward = layers * 3 * hidden * intermediate * max(1, experts)
    except (KeyError, TypeError, ZeroDivisionError):
        return None
    sizes = hidden, layers, heads, key_value_heads, head_size, vocabulary, experts
    return Model(*sizes, embeddings, attention, feed_forward)


def device_count(config: DictConfig) -> int:
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def longest_sequence(config: DictConfig) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def uses_megatron(config: DictConfig) -> bool:
    """By the section that the choice of training composed: actor.strategy may be misspelt."""
    return "megatron" in config.actor_rollout_ref.actor


def estimates(config: DictConfig) -> Estimates | None:
    """None where the sizes are not known."""
    if (model := model_of(config)) is None:
        return None
    rollout, device = config.actor_rollout_ref.rollout, DEVICE_GIB[config.trainer.device]
    # Tensor-parallel ranks split attention and, without experts over ranks, everything.
    tensor, experts = rollout.tensor_model_parallel_size, rollout.expert_parallel_size
    split = experts if model.experts and experts > 1 else tensor
    weights = BF16 * ((model.embeddings + model.attention) / tensor + model.feed_forward / split)
    cache = max(0.0, rollout.gpu_memory_utilization * device * GIB - weights)
    key_value_bytes = 2 * model.layers * model.key_value_heads * model.head_size * BF16  # of a token, over all heads
    tokens = int(cache / (key_value_bytes / min(tensor, model.key_value_heads)))
    parts = _megatron(model, config) if uses_megatron(config) else _fsdp(model, config)
    training = {name: size / GIB for name, size in zip(PARTS, parts, strict=True)}
    return Estimates(device, weights / GIB, cache / GIB, tokens, tokens / longest_sequence(config), training)


PARTS = ("weights", "gradients", "optimizer", "activations")


def _megatron(model: Model, config: DictConfig) -> tuple[float, float, float, float]:
    """Bytes of PARTS on a Megatron rank with full recomputation and sequence parallelism."""
    actor = config.actor_rollout_ref.actor
    names = ("tensor_model", "pipeline_model", "context", "expert_model")
    tensor, pipeline, context, experts = (actor.megatron[f"{name}_parallel_size"] for name in names)
    tokens = actor.ppo_max_token_len_per_gpu  # of a micro-batch, after the split over context ranks
    dies = device_count(config)
    common = (model.attention + model.embeddings) / (tensor * pipeline)
    expert_split = experts * pipeline if model.experts else tensor * pipeline
    data = context * max(1, dies // (tensor * pipeline * context))
    expert_data = max(1, dies // expert_split) if model.experts else data
    feed_forward = model.feed_forward / expert_split
    optimizer = OPTIMIZER_BYTES * (common / data + feed_forward / expert_data)
    kept = tokens / tensor * model.hidden * model.layers / pipeline * BF16
    one_layer = tokens / tensor * (8 * model.hidden + 6 * model.head_size * model.heads) * BF16
    logits = 2 * tokens * model.vocabulary / tensor * FP32
    own = common + feed_forward
    return BF16 * own, FP32 * own, optimizer, kept + one_layer + logits


def _fsdp(model: Model, config: DictConfig) -> tuple[float, float, float, float]:
    """Bytes of PARTS on an FSDP2 rank, gradients checkpointed; float32 gradients and optimizer, a layer gathered."""
    tokens, share = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu, FP32 * model.parameters
    share /= device_count(config)
    gathered = BF16 * ((model.parameters - model.embeddings) / model.layers + model.embeddings)
    kept = tokens * model.hidden * (model.layers + 8) * BF16
    return share + gathered, share, 2 * share, kept + 2 * tokens * model.vocabulary * FP32


def checkpoint_gib(config: DictConfig) -> float:
    """Of one checkpoint with weights and optimizer; 0 where the model is not known."""
    # Megatron's weights are bf16 in Hugging Face's format, FSDP2's the float32 ones of the optimizer.
    weights = BF16 if uses_megatron(config) else 0
    return (weights + OPTIMIZER_BYTES) * model.parameters / GIB if (model := model_of(config)) else 0.0


def offloaded_gib(config: DictConfig) -> float:
    """Of a machine's memory, for what its devices hand over between updates; 0 where the model is not known."""
    if (found := estimates(config)) is None:
        return 0.0
    actor, is_megatron = config.actor_rollout_ref.actor, uses_megatron(config)
    settings = actor.megatron if is_megatron else actor.fsdp_config
    # FSDP's weights are a float32 share, as large as its gradients; `weights` has the gathered layer too.
    weights = found.training["weights" if is_megatron else "gradients"]
    return config.trainer.n_gpus_per_node * (
        weights * settings.param_offload + found.training["optimizer"] * settings.optimizer_offload
    )


def find_problems(config: DictConfig) -> Iterator[Problem]:
    if (found := estimates(config)) is None:
        return
    if found.longest_responses < 1:
        value = f"{found.weights:.0f} GiB of weights and a KV cache of {found.cache_tokens} tokens on a die"
        yield Problem("memory.kv_cache", value)
    if (total := sum(found.training.values())) > found.device:
        yield Problem("memory.training", f"about {total:.0f} GiB on each die of {found.device}")


def describe(config: DictConfig) -> str | None:
    """The estimates in three lines."""
    if (found := estimates(config)) is None:
        return None
    return (
        f"rollout, a die of {found.device} GiB: weights {found.weights:.1f} GiB, KV cache {found.cache:.1f} GiB = "
        f"{found.cache_tokens:,} tokens = {found.longest_responses:.1f} longest responses\n"
        f"training: {', '.join(f'{name} {gib:.1f}' for name, gib in found.training.items())} GiB, in all "
        f"{sum(found.training.values()):.1f}\n"
        f"machine: {offloaded_gib(config):.0f} GiB of memory for what is offloaded; a checkpoint has "
        f"{checkpoint_gib(config):.0f} GiB"
    )
