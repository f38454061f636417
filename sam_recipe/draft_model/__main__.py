"""`sam distil --assets DIR [--kind eagle3]`: a trained drafter for DIR/model, from its own responses.

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
from dataclasses import asdict, replace
from pathlib import Path

from sam.bench.prompts import read_prompts
from sam.command import run_command
from sam.reading import json_object, one_line
from sam.record.tokenizer import Tokenizer
from sam_recipe.draft_model import Settings
from sam_recipe.record import build_once

ACCEPTANCE = "acceptance.json"
KINDS = ("draft_model", "eagle3")
OPTIONS = ("layers", "unroll", "prompts", "steps", "seed")  # fields of Settings too


def class_of(kind: str) -> type:
    """Of a draft model or an EAGLE3 head: with torch, which `--help` does not wait for."""
    from sam_recipe.draft_model import distil, eagle3

    return {"draft_model": distil.Student, "eagle3": eagle3.Head}[kind]


def prepare_drafter(kind: type, assets: Path, settings: Settings) -> bool:
    """Puts a drafter for assets/model into assets, unless it is there; says whether it did.

    Raises:
        ValueError: there is no target or no prompts, or the folder holds something else.
    """
    from sam_recipe.draft_model import distil, eagle3

    target, prompts = assets / "model", assets / "train.parquet"
    for path in (target / "config.json", prompts):
        if not path.is_file():
            raise ValueError(f"no {path}: make model and data first, or name their folder with --assets")
    weights = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(target.glob("*.safetensors"))
    }
    made_of = (*(Path(module.__file__) for module in (distil, eagle3)), "torch", "transformers")
    named, folder = asdict(settings) | {"target": weights}, assets / kind.folder
    progress = assets / f".distilling_{hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16]}"
    built = build_once(folder, kind.name, named, made_of, lambda new: _build(kind, new, progress, assets, settings))
    shutil.rmtree(progress, ignore_errors=True)
    return built


def _build(kind, folder: Path, progress: Path, assets: Path, settings: Settings) -> None:
    from transformers import AutoModelForCausalLM

    from sam_recipe.draft_model import distil
    from sam_recipe.tiny.warm_start import deterministic

    progress.mkdir(exist_ok=True)
    target = AutoModelForCausalLM.from_pretrained(assets / "model", local_files_only=True).float().eval()
    prompts = read_prompts(assets / "train.parquet", assets / "model", settings.prompts)
    with deterministic(settings.threads):
        examples = distil.sample_responses(target, prompts, settings, progress)
        trained = len(examples) - max(1, len(prompts) // 10) * settings.samples
        drafter = kind(target, settings)
        distil.train(target, drafter, examples[:trained], settings, progress)
        shares = distil.acceptance(target, drafter, examples[trained:])
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
    parser.add_argument("--layers", type=int, help=f"of the draft model (default {Settings.layers})")
    parser.add_argument("--unroll", type=int, help=f"passes a head is trained on (default {Settings.unroll})")
    parser.add_argument("--prompts", type=int, help=f"to answer, a tenth held out (default {Settings.prompts})")
    parser.add_argument("--steps", type=int, help=f"optimizer steps (default {Settings.steps})")
    parser.add_argument("--seed", type=int, help=f"of responses and batches (default {Settings.seed})")
    options = parser.parse_args(arguments)
    kind = class_of(options.kind)
    chosen = {name: value for name in OPTIONS if (value := getattr(options, name)) is not None}
    for name, value in chosen.items():
        if name == kind.unused:
            parser.error(f"--{name} is {value}: unused with --kind {options.kind}: leave it out")
        if value < (least := {"seed": 0, "prompts": 2}.get(name, 1)):
            parser.error(f"--{name} is {value}: expected at least {least}")

    def command() -> str:
        folder = options.assets.absolute() / kind.folder
        built = prepare_drafter(kind, options.assets.absolute(), replace(kind.defaults, **chosen))
        return f"{kind.name} {'built' if built else 'found'} in {folder}: {_said(folder)}"

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
