"""Fits the step costs of a machine for goodput: `sam profile RUN_DIR [RUN_DIR ...] --output step_cost.json`.

The table is fitted to the engine steps that runs of the recipe recorded: better one with speculation and one without.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path

from sam.command import Parser, run_command
from sam.switch.step_cost import StepCost
from sam.tools.simulate.run import RecordedRun, fit_runs


def fit_recorded(directories: list[Path]) -> StepCost:
    """Fit a table.

    Raises:
        ValueError: not a run directory, or too few steps.
    """
    fitted, _ = fit_runs([RecordedRun.load(directory) for directory in directories])
    names = ", ".join(directory.resolve().name for directory in directories)
    source = f"{fitted.cost.source}, of {names}, {date.today()}"
    if fitted.drafts_seen and fitted.plain_from > 1:
        source += (
            f"; hardly any step without drafts had fewer than {fitted.plain_from} requests: what one takes there is a "
            "guess, unless a run with speculation=off is named too"
        )
    return replace(fitted.cost, source=source)


def profile(directories: list[Path], output: Path) -> Iterator[str]:
    """Save a table of runs, and lay it out: milliseconds at the shortest and the longest context."""
    table = fit_recorded(directories)
    table.save(output)
    for c in sorted({0, len(table.context) - 1}):
        yield f"milliseconds a step, context {table.context[c]}; columns: tokens per request"
        yield "requests " + "".join(f"{tokens:8}" for tokens in table.tokens_per_request)
        for requests, row in zip(table.requests, table.milliseconds[..., c], strict=True):
            yield f"{requests:8} " + "".join(f"{ms:8.2f}" for ms in row)
    yield table.source
    yield "an engine of any model or device will take this table, which does not say what it was measured on"
    yield f"use it with speculation.policy=goodput speculation.step_cost={output.resolve()}"


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="sam profile", description=__doc__.split(":")[0] + ".")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="recorded run of the recipe")
    parser.add_argument("--output", type=Path, default=Path("step_cost.json"))
    options = parser.parse_args(arguments)
    return run_command(lambda: profile(options.runs, options.output))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
