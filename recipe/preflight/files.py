"""Whether the data sets and the model that a config names are there, whole, and of the right form."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from recipe.preflight import weights
from recipe.preflight.problem import Problem

# What a tokenizer may be stored as; Qwen3's folder has both.
VOCABULARIES = ("tokenizer.json", "vocab.json")


def find_problems(config: DictConfig, to_be_built: Path | None = None) -> Iterator[Problem]:
    """`to_be_built`: a directory whose files may be missing still."""

    def is_missing(path: Path) -> bool:
        return not path.is_file() and (to_be_built is None or to_be_built not in path.parents)

    for key in ("train_files", "val_files"):
        value = config.data[key]
        for name in [value] if isinstance(value, str) else value:
            path = Path(name).expanduser()
            if is_missing(path):
                yield Problem(
                    "data.missing", f"data.{key}={name}: no such file; make it with {_maker(config, 'prepare_data.sh')}"
                )
            elif path.is_file() and path.stat().st_size and (wrong := _wrong_parquet(path)):
                yield Problem(
                    "data.wrong_file", f"data.{key}={name}: {wrong}; make it with {_maker(config, 'prepare_data.sh')}"
                )
    model = Path(config.actor_rollout_ref.model.path).expanduser()
    key = f"actor_rollout_ref.model.path={model}"
    if is_missing(model / "config.json"):
        yield Problem(
            "model.missing", f"{key}: no config.json there; fetch it with {_maker(config, 'prepare_model.sh')}"
        )
    elif model.is_dir():
        if is_missing(model / "tokenizer_config.json"):
            yield Problem("model.missing", f"{key}: no tokenizer_config.json there; fetch the whole model")
        elif all(is_missing(model / name) for name in VOCABULARIES):
            yield Problem("model.missing", f"{key}: neither {' nor '.join(VOCABULARIES)} there; fetch the whole model")
        yield from weights.find_problems(model)


def _wrong_parquet(path: Path) -> str | None:
    import pyarrow.parquet  # a quarter of a second, and only where there are data

    try:
        found = set(pyarrow.parquet.read_schema(path).names)
    except (OSError, ValueError) as error:
        return f"no parquet file ({str(error).splitlines()[0]})"
    missing = [name for name in ("data_source", "prompt", "reward_model") if name not in found]
    return f"column {missing[0]} is missing" if missing else None


def _maker(config: DictConfig, script: str) -> str:
    if config.trainer.device == "cpu":
        return f"python -m recipe.tiny.assets --output {config.get('assets', 'outputs/tiny_assets')}"
    return f"bash scripts/{script}, or point the key at your own"


def tokenizer_problems(config: DictConfig) -> Iterator[Problem]:
    """Loads the tokenizer and lays out a prompt, as every rollout does. transformers takes seconds to import."""
    model = Path(config.actor_rollout_ref.model.path).expanduser()
    if not (model / "tokenizer_config.json").is_file():
        return  # find_problems says so
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1"}], add_generation_prompt=True)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        key = f"actor_rollout_ref.model.path={model}"
        yield Problem("model.tokenizer", f"{key}: its tokenizer does not load ({reason}): fetch the whole model again")
