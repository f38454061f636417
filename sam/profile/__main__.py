"""`python -m sam.profile --model DIR --output step_cost.json`: measures the step costs of this machine for goodput.

A vLLM engine runs a few steps with every combination of running requests, draft tokens and context (sam.profile.grid).
`--from-run` needs no engine: it fits the table to the engine steps that runs of the recipe recorded.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np

from sam.command import run_command
from sam.profile.grid import Grid, measure_cells
from sam.reading import one_line
from sam.switch.step_cost import StepCost


def fit_recorded(directories: list[Path]) -> StepCost:
    """Fit a table to the engine steps of recorded runs; it has no fingerprint, since runs record none.

    Raises:
        ValueError: not a run directory, or too few steps.
    """
    from sam.simulate.run import RecordedRun, fit_runs

    fitted, _ = fit_runs([RecordedRun.load(directory) for directory in directories])
    source = f"{fitted.cost.source}, of {', '.join(one.resolve().name for one in directories)}, {date.today()}"
    if fitted.drafts_seen and fitted.plain_from > 1:
        source += (
            f"; hardly any step without drafts had fewer than {fitted.plain_from} requests: what one takes there is a "
            "guess, unless a run with speculation=off is named too"
        )
    return replace(fitted.cost, source=source)


def measure(options: argparse.Namespace) -> StepCost:
    """Measure the grid on an engine, with a progress bar."""
    from sam.vllm.bench.profiled_engine import ProfiledEngine

    grid = Grid(options.requests, options.drafts, options.context)
    # Axes that no table can have are refused before minutes are spent on them.
    grid.table(np.ones(grid.shape))
    with one_line(f"--engine {options.engine}", "expected a JSON object of vLLM's engine arguments"):
        arguments = dict(json.loads(options.engine))
    arguments = {"max_num_seqs": max(options.requests), "max_model_len": max(options.context) + 1024, **arguments}
    engine = ProfiledEngine(options.model, max(max(options.drafts), 1), **arguments)
    cells = measure_cells(engine, grid)
    return grid.table(cells, engine.fingerprint(), f"measured by python -m sam.profile, {date.today()}")


def rising(text: str) -> list[int]:
    """Parse numbers from 0 that are separated by commas; returns them sorted."""
    values = sorted({int(part) for part in text.split(",")})
    if values[0] < 0:
        raise argparse.ArgumentTypeError(f"{text}: expected numbers from 0")
    return values


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sam.profile", description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="folder or name of the model to make an engine of")
    source.add_argument("--from-run", nargs="+", type=Path, metavar="RUN_DIR", help="recorded runs to fit")
    parser.add_argument("--output", type=Path, default=Path("step_cost.json"))
    parser.add_argument("--requests", type=rising, default=rising("1,2,4,8,16,32,64"))
    parser.add_argument("--drafts", type=rising, default=rising("0,1,2,3,5,8"), help="draft tokens of each request")
    parser.add_argument("--context", type=rising, default=rising("64,512"), help="tokens before the step")
    parser.add_argument("--engine", default='{"enforce_eager": true}', help="vLLM's engine arguments, as JSON")
    options = parser.parse_args(arguments)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")

    def shown() -> Iterator[str]:
        table = fit_recorded(options.from_run) if options.from_run else measure(options)
        table.save(options.output)
        yield from (as_text(table), table.source)
        if not table.fingerprint:
            yield "no fingerprint, since runs record no engine: one of any model or device will take this table"
        yield f"use it with speculation.policy=goodput speculation.step_cost={options.output.resolve()}"

    return run_command(shown, errors=(RuntimeError, ValueError, OSError))


def as_text(table: StepCost) -> str:
    """Lay out milliseconds by requests and tokens per request, at the shortest and the longest context."""
    lines = []
    for c in sorted({0, len(table.context) - 1}):
        lines.append(f"milliseconds a step, context {table.context[c]}; columns: tokens per request")
        lines.append("requests " + "".join(f"{tokens:8}" for tokens in table.tokens_per_request))
        for i, requests in enumerate(table.requests):
            lines.append(f"{requests:8} " + "".join(f"{ms:8.2f}" for ms in table.milliseconds[i, :, c]))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
