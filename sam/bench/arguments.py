"""`python -m sam.bench.arguments ARGUMENTS`: those of sam.bench, looked at with Python's standard library alone.

scripts/bench_cuda.sh asks before anything is installed.
"""

import argparse
import difflib
import sys
from pathlib import Path
from typing import NoReturn

from sam.bench.settings import check_variants
from sam.command import run_command

DESCRIPTION = "Does speculation pay for this model, engine and load, compared with stock vLLM?"
ALIKE = 0.8  # an option of vLLM's engine is less like any of this command's, but for one
THEIRS = "--seed"


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Options of this command, and the words left over for vLLM's engine.

    Raises:
        ValueError: one line.
    """
    parser = Parser(prog="python -m sam.bench", description=DESCRIPTION, allow_abbrev=False)
    parser.add_argument("--model", type=Path, required=True, help="folder of the model")
    parser.add_argument("--prompts", type=Path, help=".jsonl or .parquet with prompt or prompt_token_ids; or built in")
    parser.add_argument("--text", type=Path, help="recording or run directory whose responses all requests emit")
    parser.add_argument(
        "--history", type=Path, help="recording that every engine emits once before, as an earlier epoch"
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 24], help="loads: requests at once")
    parser.add_argument("--samples", type=int, default=8, help="requests of one prompt")
    parser.add_argument("--responses", type=int, default=8, help="of a round at least: small loads run several batches")
    parser.add_argument("--max-tokens", type=int, help="of a response; 256, or with --text all of it")
    parser.add_argument("--temperature", type=float, default=1.0)
    variants = "stock off sam ngram suffix draft_model hybrid eagle3; sam-k2: drafts of 2 in every step; sam-paths4"
    parser.add_argument("--variants", nargs="+", default=["stock", "off", "sam"], help=variants)
    parser.add_argument("--draft-tokens", type=int, default=8, help="longest draft of a request, 1 to 15")
    parser.add_argument("--draft-model", type=Path, metavar="DIR", help="of draft_model and hybrid, or eagle3's head")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each load and variant that count")
    parser.add_argument("--ignore-eos", action="store_true", help="all responses have --max-tokens tokens")
    parser.add_argument(
        "--seeds", action=argparse.BooleanOptionalAction,
        help="whether requests carry seeds, so that tokens can be compared; by default unless --text is given",
    )  # fmt: skip
    parser.add_argument("--output", type=Path, default=Path("outputs/bench"), help="folder for rounds, logs, result")
    parser.add_argument("--resume", action="store_true", help="go on where an interrupted measurement stopped")
    parser.add_argument("--json", action="store_true", help="print result.json in place of the table")
    options, engine = parser.parse_known_args(arguments)
    for word in engine:
        names = {name for action in parser._actions for name in action.option_strings}
        if word != THEIRS and (close := difflib.get_close_matches(word.partition("=")[0], names, 1, ALIKE)):
            raise ValueError(f"{word}: did you mean {close[0]}?")
    if engine and not engine[0].startswith("-"):
        raise ValueError(f"{engine[0]}: expected an option of sam.bench, or one of vLLM's engine")
    if not (options.model / "config.json").is_file():
        raise ValueError(f"{options.model}: no config.json there; expected the folder of a model")
    if options.rounds < 1:
        raise ValueError(f"--rounds {options.rounds}: expected 1 or more")
    if options.text and options.prompts:
        raise ValueError("--text has its own prompts: leave --prompts out")
    if options.history and not options.text:
        raise ValueError(f"--history {options.history}: it goes with --text, a later epoch of the same prompts")
    drafter = None if options.draft_model is None else str(options.draft_model)
    # suffix's package may still be to install.
    check_variants([variant for variant in options.variants if variant != "suffix"], drafter)
    return options, engine


if __name__ == "__main__":
    sys.exit(run_command(lambda: parse(None) and []))
