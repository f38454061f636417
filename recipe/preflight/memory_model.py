"""What a run needs on each die, estimated from the model's config.json: weights, KV cache, optimizer, activations.

Estimates, from the parallel sizes alone: communication buffers, fragmentation and CANN's or CUDA's own memory are not
in them. GiB are 2**30 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

GIB = 2**30
# Memory of one device, in GiB: an A3 die, an H100.
DEVICE_GIB = {"npu": 64, "cuda": 80}
BF16, FP32 = 2, 4
# Megatron's distributed optimizer: master weights and two moments in float32.
OPTIMIZER_BYTES = 3 * FP32


@dataclass(frozen=True)
class Model:
    """Sizes of a Qwen3, dense or with experts, as its config.json gives them."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    vocabulary: int
    intermediate: int
    experts: int = 0
    tied: bool = False

    @classmethod
    def from_config(cls, config: dict) -> Model:
        """Raises KeyError for a config.json without one of the sizes."""
        experts = config.get("num_experts", 0)
        return cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=config["num_attention_heads"],
            key_value_heads=config["num_key_value_heads"],
            head_size=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
            vocabulary=config["vocab_size"],
            intermediate=config["moe_intermediate_size"] if experts else config["intermediate_size"],
            experts=experts,
            tied=config.get("tie_word_embeddings", False),
        )

    @property
    def embeddings(self) -> int:
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def attention(self) -> int:
        """Parameters of all layers without their feed-forward parts, routers included."""
        heads = self.head_size * (2 * self.heads + 2 * self.key_value_heads)
        return self.layers * self.hidden * (heads + self.experts + 2)

    @property
    def feed_forward(self) -> int:
        return self.layers * 3 * self.hidden * self.intermediate * max(1, self.experts)

    @property
    def parameters(self) -> int:
        return self.embeddings + self.attention + self.feed_forward

    @property
    def key_value_bytes(self) -> int:
        """Of one token, over all layers and heads."""
        return 2 * self.layers * self.key_value_heads * self.head_size * BF16


@dataclass(frozen=True)
class Rollout:
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
        return self.weights + self.gradients + self.optimizer + self.activations


def rollout(model: Model, tensor: int, experts: int, device_gib: float, share: float, longest: int) -> Rollout:
    """Memory of vLLM on one die.

    Args:
        tensor: ranks that split attention and, without experts over ranks, everything.
        experts: ranks that the experts are spread over; 1 for a split like the rest's.
        share: of the device that vLLM may use. longest: tokens of the longest prompt and response.
    """
    split = experts if model.experts and experts > 1 else tensor
    weights = BF16 * ((model.embeddings + model.attention) / tensor + model.feed_forward / split)
    cache = max(0.0, share * device_gib * GIB - weights)
    heads_split = min(tensor, model.key_value_heads)
    tokens = int(cache / (model.key_value_bytes / heads_split))
    return Rollout(weights / GIB, cache / GIB, tokens, tokens / longest)


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
    share = model.parameters / ranks
    gathered = (model.parameters - model.embeddings) / model.layers + model.embeddings
    kept = tokens * model.hidden * (model.layers + 8) * BF16
    logits = 2 * tokens * model.vocabulary * FP32
    return Training(
        (FP32 * share + BF16 * gathered) / GIB, FP32 * share / GIB, 2 * FP32 * share / GIB, (kept + logits) / GIB
    )


def megatron_checkpoint(model: Model) -> float:
    """GiB of one checkpoint as verl writes it: weights in bf16 in Hugging Face's format, and the optimizer's state."""
    return (BF16 + OPTIMIZER_BYTES) * model.parameters / GIB


def fsdp_checkpoint(model: Model) -> float:
    """GiB of one checkpoint as verl writes it: float32 weights and two moments."""
    return 3 * FP32 * model.parameters / GIB
