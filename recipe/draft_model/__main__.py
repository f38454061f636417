"""`python -m recipe.draft_model --assets DIR`: a draft model for DIR/model, distilled from its own responses.

The prompts are those of DIR/train.parquet. DIR/draft_model then holds weights, config and tokenizer as transformers and
vLLM load them: what speculation.draft_model takes. A second call with the same settings and target returns at once; one
that was stopped goes on where it was.
"""

# ruff: noqa: E402
import os

# Read when torch is loaded. Threads that spin while they wait take ten times a step's CPU time on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import hashlib
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

from recipe.draft_model.distil import DistilSettings, distil, sample_responses
from recipe.record.built_folder import Contents, build_once
from sam.command import run_command

FOLDER = "draft_model"


def prepare_draft_model(assets: Path, settings: DistilSettings) -> bool:
    """Puts a draft model for assets/model into assets/draft_model, unless it is there; says whether it did.

    Raises:
        ValueError: there is no target or no prompts, or the folder holds something else.
    """
    target, prompts = assets / "model", assets / "train.parquet"
    for path in (target / "config.json", prompts):
        if not path.is_file():
            raise ValueError(f"no {path}: make model and data first, or name their folder with --assets")
    weights = {path.name: _digest(path) for path in sorted(target.glob("*.safetensors"))}
    contents = Contents(
        "a draft model",
        asdict(settings) | {"target": weights},
        [Path(__file__).with_name(name) for name in ("__main__.py", "distil.py")],
        packages=("torch", "transformers"),
    )
    progress = assets / f".distilling_{contents.digest()[:16]}"
    built = build_once(assets / FOLDER, contents, lambda folder: _build(folder, progress, assets, settings))
    shutil.rmtree(progress, ignore_errors=True)
    return built


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _build(folder: Path, progress: Path, assets: Path, settings: DistilSettings) -> None:
    # transformers takes seconds to import: only after everything that may be wrong was looked at.
    import pandas
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from recipe.tiny.warm_start import deterministic

    progress.mkdir(exist_ok=True)
    target = AutoModelForCausalLM.from_pretrained(assets / "model", local_files_only=True).float()
    tokenizer = AutoTokenizer.from_pretrained(assets / "model", local_files_only=True)
    rows = pandas.read_parquet(assets / "train.parquet")["prompt"][: settings.prompts]
    prompts = [
        tokenizer.apply_chat_template(list(row), add_generation_prompt=True, return_dict=True)["input_ids"]
        for row in rows
    ]
    with deterministic(settings.threads):
        examples = sample_responses(target, prompts, settings, progress)
        student, _ = distil(target, examples, settings, progress)
    student.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(arguments: list[str] | None = None) -> int:
    """Read the command line, make the draft model."""
    parser = argparse.ArgumentParser(prog="python -m recipe.draft_model", description=__doc__)
    parser.add_argument("--assets", type=Path, required=True, help="folder with model/ and train.parquet")
    usual = DistilSettings()
    parser.add_argument("--layers", type=int, default=usual.layers, help="of the draft model (default %(default)s)")
    parser.add_argument("--prompts", type=int, default=usual.prompts, help="prompts to answer (default %(default)s)")
    parser.add_argument("--steps", type=int, default=usual.steps, help="optimizer steps (default %(default)s)")
    parser.add_argument("--seed", type=int, default=usual.seed, help="of responses and batches (default %(default)s)")
    options = parser.parse_args(arguments)
    for name in ("layers", "prompts", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}: expected at least 1")
    if options.seed < 0:
        parser.error(f"--seed is {options.seed}: expected a number from 0 up")

    def command() -> str:
        assets = options.assets.absolute()
        names = ("layers", "prompts", "steps", "seed")
        built = prepare_draft_model(assets, DistilSettings(**{name: getattr(options, name) for name in names}))
        return f"draft model {'built' if built else 'found'} in {assets / FOLDER}"

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
