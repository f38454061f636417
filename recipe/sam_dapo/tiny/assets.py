"""`python -m recipe.sam_dapo.tiny.assets --output DIR`: model, tokenizer and data of the tiny world, built once.

DIR then holds model/ (weights and tokenizer, loadable by transformers and vLLM), train.parquet, val.parquet
and assets.json (the settings they were built from). A second call with the same settings returns at once.
"""

# ruff: noqa: E402
import os

# Read when torch is loaded. Threads that spin while they wait take ten times a step's CPU time on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import sys
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from random import Random

import pandas

from recipe.sam_dapo.assets import build_command, build_once
from recipe.sam_dapo.tiny import shipped
from recipe.sam_dapo.tiny.model import ModelSettings, build_model
from recipe.sam_dapo.tiny.task import Problem, TaskSettings, as_row, draw_problems
from recipe.sam_dapo.tiny.tokenizer import build_tokenizer
from recipe.sam_dapo.tiny.warm_start import WarmStartSettings, warm_start
from sam.command import Parser

NAME = "tiny assets"
SOURCES = ("assets.py", "model.py", "shipped.py", "task.py", "tokenizer.py", "warm_start.py")


@dataclass(frozen=True)
class AssetSettings:
    """Everything the assets depend on; train_rows and val_rows count problems."""

    seed: int = 0
    train_rows: int = 2000
    val_rows: int = 64
    task: TaskSettings = field(default_factory=TaskSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    warm_start: WarmStartSettings = field(default_factory=WarmStartSettings)


def prepare_assets(output: Path, settings: AssetSettings) -> bool:
    """Puts the assets under `output`, unless they are there already; says whether it did.

    Raises:
        ValueError: `output` holds something else than assets.
    """
    sources = [Path(__file__).with_name(name) for name in SOURCES]
    made_of = [*sources, "torch", "transformers"]
    return build_once(output, NAME, asdict(settings), made_of, lambda folder: _build(folder, settings))


def draw_splits(settings: AssetSettings) -> tuple[list[Problem], list[Problem]]:
    """Training and validation problems: all different."""
    stream = draw_problems(Random(f"problems {settings.seed}"), settings.task)
    validation = list(islice(stream, settings.val_rows))
    return list(islice(stream, settings.train_rows)), validation


def _build(folder: Path, settings: AssetSettings) -> None:
    train, validation = draw_splits(settings)
    for split, problems in (("train", train), ("val", validation)):
        rows = [as_row(problem, split, index) for index, problem in enumerate(problems)]
        pandas.DataFrame(rows).to_parquet(folder / f"{split}.parquet")
    tokenizer = build_tokenizer()
    model = build_model(settings.model, tokenizer, settings.seed)
    wanted = shipped.fingerprint(settings.model, settings.task, settings.warm_start, validation, settings.seed)
    weights = shipped.shipped_weights(wanted)
    if weights is None:
        warm_start(model, tokenizer, settings.task, settings.warm_start, validation, settings.seed)
    else:
        model.load_state_dict(weights, strict=False)  # tied weights stand there once
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="python -m recipe.sam_dapo.tiny.assets", description=__doc__)
    return build_command(parser, arguments, NAME, lambda output, seed: prepare_assets(output, AssetSettings(seed=seed)))


if __name__ == "__main__":
    sys.exit(main())
