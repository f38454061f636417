"""The tiny Qwen3 model, and a batched sampler to measure it with."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from recipe.tiny.tokenizer import encode_prompt


@dataclass(frozen=True)
class ModelSettings:
    """Shape and initial weights of the model.

    Attributes:
        initializer_range: standard deviation of the initial weights; near 1 / sqrt(hidden_size), because with
            transformers' default of 0.02 so narrow a model takes far longer to learn to look numbers up.
    """

    hidden_size: int = 128
    intermediate_size: int = 256
    layers: int = 2
    attention_heads: int = 4
    key_value_heads: int = 2
    head_dim: int = 32
    max_positions: int = 2048
    initializer_range: float = 0.08


def build_model(settings: ModelSettings, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """An untrained float32 model with tied embeddings; its vocabulary is exactly the tokenizer's."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.attention_heads,
        num_key_value_heads=settings.key_value_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=settings.max_positions,
        initializer_range=settings.initializer_range,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).float()
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    return model


@torch.no_grad()
def sample_responses(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    questions: Sequence[str],
    *,
    temperature: float,
    seed: int,
    max_new_tokens: int = 640,
) -> list[list[int]]:
    """One response per question, as token ids up to and including the end token.

    Args:
        temperature: 0.0 takes the most likely token; above it, tokens are drawn from the whole vocabulary.
        seed: of the draw; the global random state is left as it was.
        max_new_tokens: responses are cut off here.
    """
    tokenizer_ids = [encode_prompt(tokenizer, question) for question in questions]
    width = max(map(len, tokenizer_ids))
    padded = torch.tensor([[tokenizer.pad_token_id] * (width - len(ids)) + ids for ids in tokenizer_ids])
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in tokenizer_ids])
    drawing = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature > 0 else {"do_sample": False}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        output = model.generate(padded, attention_mask=mask, max_new_tokens=max_new_tokens, **drawing)
    end = tokenizer.eos_token_id
    responses = [row[width:].tolist() for row in output]
    return [row[: row.index(end) + 1] if end in row else row for row in responses]
