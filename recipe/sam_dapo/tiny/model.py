"""The tiny Qwen3 model."""

from dataclasses import asdict, dataclass

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


@dataclass(frozen=True)
class ModelSettings:
    """Shape and initial weights of the model, under the names of Qwen3Config."""

    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    max_position_embeddings: int = 2048
    # Near 1 / sqrt(hidden_size): with 0.02 so narrow a model takes far longer to learn to look numbers up.
    initializer_range: float = 0.08


def build_model(settings: ModelSettings, tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen3ForCausalLM:
    """An untrained float32 model with tied embeddings; its vocabulary is exactly the tokenizer's."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        **asdict(settings),
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
