"""python3 tests/gpu/shapes.py MODEL FOLDER MEMORY_MIB VARIANT...: a shape of Qwen3, and an engine's part of the memory.

Writes config.json into FOLDER; prints the engine's share of the memory and the loads that fit, for a shell to evaluate.
"""

import json
import sys
from pathlib import Path

VOCABULARY = 151936
HEAD = 128
KEY_VALUE_HEADS = 8
# Hidden size, intermediate size, layers, attention heads, tied embeddings: the published configs.
SHAPES = {
    "tiny": (1024, 3072, 2, 16, True),
    "0.6b": (1024, 3072, 28, 16, True),
    "1.7b": (2048, 6144, 28, 16, True),
    "4b": (2560, 9728, 36, 32, True),
    "8b": (4096, 12288, 36, 32, False),
    "32b": (5120, 25600, 64, 64, False),
}
REST_GIB = 3  # of an engine beside weights: activations, graphs, the least of a KV cache
MOST_GIB = 10  # more, for 256 requests with 36 layers


def config_of(shape: tuple) -> dict:
    """As transformers has it."""
    hidden, inner, layers, heads, is_tied = shape
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "head_dim": HEAD,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000,
        "initializer_range": 0.02,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": is_tied,
    }


def weights_gib(shape: tuple) -> float:
    """Of bfloat16 weights."""
    hidden, inner, layers, heads, is_tied = shape
    attention = hidden * HEAD * 2 * (heads + KEY_VALUE_HEADS)
    embeddings = VOCABULARY * hidden * (1 if is_tied else 2)
    return 2 * (layers * (attention + 3 * hidden * inner) + embeddings) / 2**30


def main() -> None:
    model, folder, memory_mib, *variants = sys.argv[1:]
    if model not in SHAPES:
        sys.exit(f"error: model {model}: expected {', '.join(SHAPES)}")
    shape = SHAPES[model]
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "config.json").write_text(json.dumps(config_of(shape), indent=1) + "\n")
    whole = 970 if model == "32b" else 900  # thousandths of the memory; two engines of 32b fit an H200 barely
    share = whole // len(variants) / 1000
    given = share * int(memory_mib) / 1024
    needed = weights_gib(shape) + REST_GIB
    if given and given < needed:
        engines = f"{len(variants)} engines of {given:.0f} GiB each"
        sys.exit(f"error: {engines}, one needs {needed:.0f}: fewer VARIANTS, or more memory")
    fits_all = not given or shape[2] < 36 or given > needed + MOST_GIB
    print(f'share={share}; fitting="1 4 16 64{" 256" if fits_all else ""}"')


if __name__ == "__main__":
    main()
