"""Whether a run fits on its devices, estimated from the model's config.json and the parallel sizes alone.

Communication buffers, fragmentation and CANN's or CUDA's own memory are not in the estimates. GiB are 2**30 bytes; a
die is a device, and half of an Ascend A3's package.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

from omegaconf import DictConfig

from sam.trained_drafter import settings_of

GIB = 2**30
DEVICE_GIB = {"npu": 64, "cuda": 80}  # of one device: an A3 die, an H100
BF16 = 2  # bytes
FP32 = 4
OPTIMIZER = 3 * FP32  # master weights and two moments: Megatron's distributed optimizer, and what FSDP2 saves


class Model(NamedTuple):
    """A Qwen3, dense or with experts: sizes, and the parameters of its parts over all layers."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    vocabulary: int
    experts: int  # 0: dense
    embeddings: int
    attention: int  # and all else but the feed-forward part, routers included
    feed_forward: int

    @classmethod
    def from_config(cls, config: dict) -> Self:
        """Read a config.json's content; KeyError, TypeError or ZeroDivisionError where it has not the sizes."""
        hidden = config["hidden_size"]
        layers = config["num_hidden_layers"]
        heads = config["num_attention_heads"]
        key_value_heads = config["num_key_value_heads"]
        head_size = config.get("head_dim") or hidden // heads
        vocabulary = config["vocab_size"]
        experts = config.get("num_experts", 0)
        intermediate = config["moe_intermediate_size"] if experts else config["intermediate_size"]
        matrices = 1 if config.get("tie_word_embeddings") else 2
        return cls(
            hidden=hidden,
            layers=layers,
            heads=heads,
            key_value_heads=key_value_heads,
            head_size=head_size,
            vocabulary=vocabulary,
            experts=experts,
            embeddings=matrices * vocabulary * hidden,
            attention=layers * hidden * (2 * head_size * (heads + key_value_heads) + experts + 2),
            feed_forward=layers * 3 * hidden * intermediate * max(1, experts),
        )

    @property
    def parameters(self) -> int:
        return self.embeddings + self.attention + self.feed_forward

    @property
    def logits_bytes(self) -> int:
        """Of one token, with their gradients."""
        return 2 * self.vocabulary * FP32


class Generation(NamedTuple):
    """GiB of one die while generating, the tokens that its KV cache holds, and whole responses at once."""

    weights: float
    cache: float
    cache_tokens: int
    longest_responses: float


class Training(NamedTuple):
    """GiB of one die while updating, with nothing offloaded that the update uses."""

    weights: float
    gradients: float
    optimizer: float
    activations: float


class DeviceMemory(NamedTuple):
    """What a run needs of a die of `device` GiB, and in GiB one checkpoint and what a machine keeps for its devices."""

    device: int
    generation: Generation
    training: Training
    checkpoint: float  # with weights and optimizer
    offloaded: float  # of a machine's memory, for what its devices hand over between updates


def device_count(config: DictConfig) -> int:
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def longest_sequence(config: DictConfig) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def uses_megatron(config: DictConfig) -> bool:
    """By the section that the choice of training composed: actor.strategy may be misspelt."""
    return "megatron" in config.actor_rollout_ref.actor


def generation(model: Model, rollout: DictConfig, device_gib: float, longest: int) -> Generation:
    """Memory of vLLM on one die.

    Args:
        rollout: verl's section. Tensor-parallel ranks split attention and, without experts over ranks, everything.
        longest: tokens of the longest prompt and response.
    """
    tensor = rollout.tensor_model_parallel_size
    feed_forward_ranks = max(tensor, rollout.expert_parallel_size) if model.experts else tensor
    weights = BF16 * ((model.embeddings + model.attention) / tensor + model.feed_forward / feed_forward_ranks)
    cache = max(0.0, rollout.gpu_memory_utilization * device_gib * GIB - weights)
    heads = model.key_value_heads / min(tensor, model.key_value_heads)
    token_bytes = 2 * model.layers * heads * model.head_size * BF16  # keys and values
    tokens = int(cache / token_bytes)
    return Generation(weights / GIB, cache / GIB, tokens, tokens / longest)


def megatron(model: Model, dies: int, sizes: DictConfig, tokens: int) -> Training:
    """Memory of a Megatron rank with full recomputation and sequence parallelism.

    Args:
        sizes: verl's section `megatron`, with the parallel sizes.
        tokens: of a micro-batch, before sequence parallelism splits it over the tensor-parallel ranks.
    """
    tensor = sizes.tensor_model_parallel_size
    pipeline = sizes.pipeline_model_parallel_size
    context = sizes.context_parallel_size
    copies = context * max(1, dies // (tensor * pipeline * context))  # that share the optimizer of a rank's weights
    common = (model.attention + model.embeddings) / (tensor * pipeline)
    if model.experts:
        split = sizes.expert_model_parallel_size * pipeline
        expert_copies = max(1, dies // split)
    else:
        split = tensor * pipeline
        expert_copies = copies
    feed_forward = model.feed_forward / split
    kept = model.hidden * model.layers / pipeline
    one_layer = 8 * model.hidden + 6 * model.head_size * model.heads
    return Training(
        weights=BF16 * (common + feed_forward) / GIB,
        gradients=FP32 * (common + feed_forward) / GIB,
        optimizer=OPTIMIZER * (common / copies + feed_forward / expert_copies) / GIB,
        activations=tokens / tensor * (BF16 * (kept + one_layer) + model.logits_bytes) / GIB,
    )


def fsdp(model: Model, dies: int, tokens: int) -> Training:
    """Memory of an FSDP2 rank with checkpointed gradients: weights, gradients and optimizer in float32, and one layer
    gathered. `tokens`: of a micro-batch."""
    share = FP32 * model.parameters / dies
    gathered = BF16 * ((model.attention + model.feed_forward) / model.layers + model.embeddings)
    kept = model.hidden * (model.layers + 8)
    return Training(
        weights=(share + gathered) / GIB,
        gradients=share / GIB,
        optimizer=2 * share / GIB,
        activations=tokens * (BF16 * kept + model.logits_bytes) / GIB,
    )


def model_of(config: DictConfig) -> Model | None:
    """The model's sizes; None where its config.json is not there or lacks some."""
    try:
        return Model.from_config(settings_of(Path(config.actor_rollout_ref.model.path).expanduser()))
    except (KeyError, TypeError, ZeroDivisionError):
        return None


def device_memory(config: DictConfig) -> DeviceMemory | None:
    """None for a CPU, and where the model's sizes are not known."""
    device = DEVICE_GIB.get(config.trainer.device)
    model = model_of(config)
    if device is None or model is None:
        return None
    actor = config.actor_rollout_ref.actor
    dies = device_count(config)
    tokens = actor.ppo_max_token_len_per_gpu
    if uses_megatron(config):
        offloads = actor.megatron
        training = megatron(model, dies, offloads, tokens)
        own_weights = training.weights
        saved = BF16 + OPTIMIZER  # weights are saved in Hugging Face's format, too
    else:
        offloads = actor.fsdp_config
        training = fsdp(model, dies, tokens)
        own_weights = training.gradients  # as large: a share in float32, without the layer that is gathered
        saved = OPTIMIZER
    offloaded = own_weights * offloads.param_offload + training.optimizer * offloads.optimizer_offload
    return DeviceMemory(
        device=device,
        generation=generation(model, config.actor_rollout_ref.rollout, device, longest_sequence(config)),
        training=training,
        checkpoint=saved * model.parameters / GIB,
        offloaded=config.trainer.n_gpus_per_node * offloaded,
    )


def problems(config: DictConfig) -> Iterator[str]:
    """Whether rollout and training fit on a die."""
    memory = device_memory(config)
    if memory is None:
        return
    rollout = memory.generation
    if rollout.longest_responses < 1:
        holds = f"{rollout.weights:.0f} GiB of weights and a KV cache of {rollout.cache_tokens} tokens on a die"
        remedy = "raise rollout.tensor_model_parallel_size or gpu_memory_utilization"
        yield f"{holds}: less than one longest response: {remedy} [memory.kv_cache]"
    total = sum(memory.training)
    if total > memory.device:
        remedy = "raise the actor's parallel sizes, or lower its ppo_max_token_len_per_gpu"
        yield f"about {total:.0f} GiB on each die of {memory.device}: training does not fit: {remedy} [memory.training]"


def describe(config: DictConfig) -> str:
    """The estimates in one line."""
    memory = device_memory(config)
    if memory is None:
        return "no estimate of a device's memory: no accelerator, or no config.json of the model"
    rollout = memory.generation
    training = ", ".join(f"{name} {gib:.1f}" for name, gib in memory.training._asdict().items())
    return (
        f"rollout, a die of {memory.device} GiB: weights {rollout.weights:.1f} GiB, KV cache {rollout.cache:.1f} GiB = "
        f"{rollout.cache_tokens:,} tokens = {rollout.longest_responses:.1f} longest responses; training: {training} "
        f"GiB, in all {sum(memory.training):.1f}; a checkpoint has {memory.checkpoint:.0f} GiB"
    )
