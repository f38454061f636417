"""Which tokenizer and which shape of model a history was written with: token ids of another mean something else."""

import hashlib
from pathlib import Path

from sam.trained_drafter import settings_of

# The first of these that a model's folder has decides what a token id means.
TOKENIZER_FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"), ("vocab.txt",))
SHAPE = ("hidden_size", "num_hidden_layers", "vocab_size")


def fingerprint(model: str) -> dict[str, str]:
    """What `model`, a folder or a name, writes in.

    Returns:
        tokenizer: a hash of its file, or the name where there is no folder. model: its type and sizes, as in
        "qwen3, hidden_size 128, num_hidden_layers 2, vocab_size 64"; training does not change them.
    """
    folder = Path(model)
    if not folder.is_dir():
        return {"tokenizer": model, "model": model}
    found = next((names for names in TOKENIZER_FILES if all((folder / name).is_file() for name in names)), ())
    tokenizer = hashlib.blake2b(digest_size=8)
    for name in found:
        tokenizer.update((folder / name).read_bytes())
    config = settings_of(folder)
    text = config.get("text_config")  # of models that read pictures too
    sizes = config | (text if isinstance(text, dict) else {})
    described = [str(config.get("model_type")), *(f"{name} {sizes[name]}" for name in SHAPE if name in sizes)]
    return {"tokenizer": tokenizer.hexdigest() if found else "none", "model": ", ".join(described)}
