"""Whether a config's run fits on its devices, estimated from the model's config.json and the parallel sizes alone.

Communication buffers, fragmentation and CANN's or CUDA's own memory are not in the estimates. GiB are 2**30 bytes.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

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

    @classmethod
    def from_config(cls, config: dict) -> Self:
        """Raises KeyError for a config.json without one of the sizes."""
        hidden, layers, vocabulary = config["hidden_size"], config["num_hidden_layers"], config["vocab_size"]
        heads, key_value_heads = config["num_attention_heads"], config["num_key_value_heads"]
        head_size, experts = config.get("head_dim") or hidden // heads, config.get("num_experts", 0)
        intermediate = config["moe_intermediate_size"] if experts else config["intermediate_size"]
        sizes = hidden, layers, heads, key_value_heads, head_size, vocabulary, experts
        embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
        attention = layers * hidden * (2 * head_size * (heads + key_value_heads) + experts + 2)
        return cls(*sizes, embeddings, attention, feed_forward=layers * 3 * hidden * intermediate * max(1, experts))

    @property
    def parameters(self) -> int:
        return self.embeddings + self.attention + self.feed_forward

    @property
    def key_value_bytes(self) -> int:
        """Of one token, over all layers and heads."""
        return 2 * self.layers * self.key_value_heads * self.head_size * BF16


@dataclass(frozen=True)
class Generation:
    """GiB of one die while generating, the tokens that its KV cache holds, and whole responses at once."""

    weights: float
    cache: float
    cache_tokens: int
    longest_responses: float


@dataclass(frozen=True)
class Training:
    """GiB of one die while updating, with nothing offloaded that the update uses."""

    weights: float
    gradients: float
    optimizer: float
    activations: float

    @property
    def total(self) -> float:
        return sum(asdict(self).values())


def generation(model: Model, tensor: int, experts: int, device_gib: float, share: float, longest: int) -> Generation:
    """Memory of vLLM on one die.

    Args:
        tensor: ranks that split attention and, without experts over ranks, everything.
        experts: ranks that the experts are spread over; 1 for a split like the rest's.
        share: of the device that vLLM may use.
        longest: tokens of the longest prompt and response.
    """
    split = experts if model.experts and experts > 1 else tensor
    weights = BF16 * ((model.embeddings + model.attention) / tensor + model.feed_forward / split)
    cache = max(0.0, share * device_gib * GIB - weights)
    heads_split = min(tensor, model.key_value_heads)
    tokens = int(cache / (model.key_value_bytes / heads_split))
    return Generation(weights / GIB, cache / GIB, tokens, tokens / longest)


def megatron(model: Model, dies: int, sizes: dict[str, int], tokens: int) -> Training:
    """Memory of a Megatron rank with full recomputation and sequence parallelism.

    Args:
        sizes: tensor, pipeline, context, expert: parallel sizes.
        tokens: of one micro-batch on one rank, after the split over context ranks.
    """
    tensor, pipeline, context = sizes["tensor"], sizes["pipeline"], sizes["context"]
    data = max(1, dies // (tensor * pipeline * context))
    common = (model.attention + model.embeddings) / (tensor * pipeline)
    expert_split = sizes["expert"] * pipeline if model.experts else tensor * pipeline
    expert_data = max(1, dies // expert_split) if model.experts else data * context
    feed_forward = model.feed_forward / expert_split
    own = common + feed_forward
    optimizer = OPTIMIZER_BYTES * (common / (data * context) + feed_forward / expert_data)
    kept = tokens / tensor * model.hidden * model.layers / pipeline * BF16
    one_layer = tokens / tensor * (8 * model.hidden + 6 * model.head_size * model.heads) * BF16
    logits = 2 * tokens * model.vocabulary / tensor * FP32
    return Training(BF16 * own / GIB, FP32 * own / GIB, optimizer / GIB, (kept + one_layer + logits) / GIB)


def fsdp(model: Model, ranks: int, tokens: int) -> Training:
    """Memory of an FSDP2 rank with gradient checkpointing; float32 gradients and optimizer, one layer gathered."""
    share = FP32 * model.parameters / ranks
    gathered = BF16 * ((model.parameters - model.embeddings) / model.layers + model.embeddings)
    kept = tokens * model.hidden * (model.layers + 8) * BF16
    logits = 2 * tokens * model.vocabulary * FP32
    return Training((share + gathered) / GIB, share / GIB, 2 * share / GIB, (kept + logits) / GIB)


def sizes_of(config: DictConfig) -> Model | None:
    """The model's; None for a CPU and where its config.json is not there or has no sizes."""
    if config.trainer.device not in DEVICE_GIB:
        return None
    try:
        return Model.from_config(settings_of(Path(config.actor_rollout_ref.model.path).expanduser()))
    except (ValueError, KeyError, TypeError, ZeroDivisionError):
        return None


def device_count(config: DictConfig) -> int:
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def longest_sequence(config: DictConfig) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def uses_megatron(config: DictConfig) -> bool:
    """By the section that the choice of training composed: actor.strategy may be misspelt."""
    return "megatron" in config.actor_rollout_ref.actor


def checkpoint_gib(config: DictConfig) -> float:
    """Of one checkpoint with weights and optimizer; 0 where the model is not known."""
    # Megatron's weights are bf16 in Hugging Face's format, FSDP2's the float32 ones of the optimizer.
    weights = BF16 if uses_megatron(config) else 0
    return (weights + OPTIMIZER_BYTES) * model.parameters / GIB if (model := sizes_of(config)) else 0.0


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
    size = BF16 if uses_megatron(config) else FP32
    return model.vocabulary * model.hidden * size / 2**20 if (model := sizes_of(config)) else 0.0


def estimates(config: DictConfig) -> tuple[Generation, Training, float] | None:
    """Rollout, training and the device's GiB; None where the sizes are not known."""
    if (model := sizes_of(config)) is None:
        return None
    actor, rollout, device = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout, config.trainer.device
    ranks = rollout.tensor_model_parallel_size, rollout.expert_parallel_size
    memory = DEVICE_GIB[device], rollout.gpu_memory_utilization
    generating = generation(model, *ranks, *memory, longest_sequence(config))
    dies = device_count(config)
    if uses_megatron(config):
        names = ("tensor_model", "pipeline_model", "context", "expert_model")
        sizes = {name.split("_")[0]: actor.megatron[f"{name}_parallel_size"] for name in names}
        training = megatron(model, dies, sizes, actor.ppo_max_token_len_per_gpu)
    else:
        training = fsdp(model, dies, actor.ppo_max_token_len_per_gpu)
    return generating, training, DEVICE_GIB[device]


def find_problems(config: DictConfig) -> Iterator[Problem]:
    if (found := estimates(config)) is None:
        return
    generating, training, device = found
    if generating.longest_responses < 1:
        value = f"{generating.weights:.0f} GiB of weights and a KV cache of {generating.cache_tokens} tokens on a die"
        yield Problem("memory.kv_cache", value)
    if training.total > device:
        yield Problem("memory.training", f"about {training.total:.0f} GiB on each die of {device}")


def describe(config: DictConfig) -> str | None:
    """The estimates in three lines."""
    if (found := estimates(config)) is None:
        return None
    generating, training, device = found
    return (
        f"rollout, a die of {device} GiB: weights {generating.weights:.1f} GiB, KV cache {generating.cache:.1f} GiB = "
        f"{generating.cache_tokens:,} tokens = {generating.longest_responses:.1f} longest responses\n"
        f"training: {', '.join(f'{name} {gib:.1f}' for name, gib in asdict(training).items())} GiB, in all "
        f"{training.total:.1f}\n"
        f"machine: {offloaded_gib(config):.0f} GiB of memory for what is offloaded; a checkpoint has "
        f"{checkpoint_gib(config):.0f} GiB"
    )
