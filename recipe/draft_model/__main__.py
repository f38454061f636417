"""`python -m recipe.draft_model --assets DIR [--kind eagle3]`: a trained drafter for DIR/model, from its own responses.

A draft model goes into DIR/draft_model, with tokenizer, as transformers and vLLM load it; an EAGLE3 head into
DIR/eagle3_head, as vLLM loads it: what speculation.draft_model takes. The prompts are those of DIR/train.parquet; how
many of its tokens held-out responses have too is said at the end. A second call with the same settings and target
returns at once; one that was stopped goes on where it was.
"""

# ruff: noqa: E402
import os

# Read when torch is loaded. Threads that spin while they wait take ten times a step's CPU time on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from recipe.draft_model import acceptance
from recipe.draft_model.distil import DistilSettings, TrainingSettings, distil, sample_responses
from recipe.draft_model.eagle3 import HeadSettings, train_head
from recipe.record import Contents, build_once
from sam.bench.prompts import read_prompts
from sam.command import run_command
from sam.reading import json_object, one_line
from sam.record.tokenizer import Tokenizer

ACCEPTANCE = "acceptance.json"


@dataclass(frozen=True)
class Kind:
    """A kind of trained drafter.

    Attributes:
        name: in messages.
        folder: beside the target's.
        settings: type of its settings.
        train: of the target, examples, settings and a folder for what is done, the drafter and its losses.
        drafted: of the target and the drafter, what `acceptance.by_position` takes.
        source: the file that makes it.
    """

    name: str
    folder: str
    settings: type[TrainingSettings]
    train: Callable
    drafted: Callable
    source: str


KINDS = {
    "draft_model": Kind(
        *("draft model", "draft_model", DistilSettings, distil),
        *(lambda target, student: acceptance.of_draft_model(student), "distil.py"),
    ),
    "eagle3": Kind("EAGLE3 head", "eagle3_head", HeadSettings, train_head, acceptance.of_head, "eagle3.py"),
}


def prepare_drafter(kind: Kind, assets: Path, settings: TrainingSettings) -> bool:
    """Puts a drafter for assets/model into assets, unless it is there; says whether it did.

    Raises:
        ValueError: there is no target or no prompts, or the folder holds something else.
    """
    target, prompts = assets / "model", assets / "train.parquet"
    for path in (target / "config.json", prompts):
        if not path.is_file():
            raise ValueError(f"no {path}: make model and data first, or name their folder with --assets")
    weights = {path.name: _digest(path) for path in sorted(target.glob("*.safetensors"))}
    contents = Contents(
        kind.name,
        asdict(settings) | {"target": weights},
        [Path(__file__).with_name(name) for name in sorted({"__main__.py", "distil.py", kind.source})],
        packages=("torch", "transformers"),
    )
    progress = assets / f".distilling_{contents.digest()[:16]}"
    built = build_once(assets / kind.folder, contents, lambda folder: _build(kind, folder, progress, assets, settings))
    shutil.rmtree(progress, ignore_errors=True)
    return built


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _build(kind: Kind, folder: Path, progress: Path, assets: Path, settings: TrainingSettings) -> None:
    # transformers takes seconds to import: only after everything that may be wrong was looked at.
    from transformers import AutoModelForCausalLM

    from recipe.tiny.warm_start import deterministic

    progress.mkdir(exist_ok=True)
    target = AutoModelForCausalLM.from_pretrained(assets / "model", local_files_only=True).float()
    prompts = read_prompts(assets / "train.parquet", assets / "model", settings.prompts)
    with deterministic(settings.threads):
        examples = sample_responses(target, prompts, settings, progress)
        trained = len(examples) - max(1, len(prompts) // 10) * settings.samples
        drafter, _ = kind.train(target, examples[:trained], settings, progress)
        shares = acceptance.by_position(kind.drafted(target, drafter), examples[trained:])
    drafter.save_pretrained(folder)
    Tokenizer(assets / "model").whole.save_pretrained(folder)
    (folder / ACCEPTANCE).write_text(json.dumps({"responses": len(examples) - trained, "by_position": shares}) + "\n")


def _said(folder: Path) -> str:
    with one_line(str(folder / ACCEPTANCE), "remove the folder and build it again"):
        found = json_object(folder / ACCEPTANCE)
        shares = ", ".join(f"{share:.0%}" for share in found["by_position"])
    return f"of {found['responses']} held-out responses, by position of a draft, {shares} of its tokens are right"


def main(arguments: list[str] | None = None) -> int:
    """Read the command line, make the drafter."""
    parser = argparse.ArgumentParser(prog="sam distil", description=__doc__)
    parser.add_argument("--assets", type=Path, required=True, help="folder with model/ and train.parquet")
    parser.add_argument("--kind", choices=KINDS, default="draft_model", help="default %(default)s")
    usual = TrainingSettings()
    parser.add_argument("--layers", type=int, help=f"of the draft model (default {DistilSettings.layers})")
    parser.add_argument("--unroll", type=int, help=f"passes a head is trained on (default {HeadSettings.unroll})")
    parser.add_argument("--prompts", type=int, help=f"to answer, a tenth held out (default {usual.prompts})")
    parser.add_argument("--steps", type=int, help=f"optimizer steps (default {usual.steps})")
    parser.add_argument("--seed", type=int, help=f"of responses and batches (default {usual.seed})")
    options = parser.parse_args(arguments)
    kind = KINDS[options.kind]
    names = ("layers", "unroll", "prompts", "steps", "seed")
    chosen = {name: value for name in names if (value := getattr(options, name)) is not None}
    known = {field.name for field in fields(kind.settings)}
    for name, value in chosen.items():
        if name not in known:
            parser.error(f"--{name} is {value}: unused with --kind {options.kind}: leave it out")
        if value < (least := {"seed": 0, "prompts": 2}.get(name, 1)):
            parser.error(f"--{name} is {value}: expected at least {least}")

    def command() -> str:
        folder = options.assets.absolute() / kind.folder
        built = prepare_drafter(kind, options.assets.absolute(), kind.settings(**chosen))
        return f"{kind.name} {'built' if built else 'found'} in {folder}: {_said(folder)}"

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
