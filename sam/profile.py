"""Measures the step costs of this machine for goodput: `sam profile --model DIR --output step_cost.json`.

A vLLM engine runs a few steps with every combination of running requests, draft tokens and context, on a machine that
may run other programs. They make steps slower, never faster, so the grid is measured in rounds, each of which visits
every cell for a few steps: a disturbance meets one round of many cells, not all rounds of one. A cell that comes out
slower than one with more work was disturbed, and counts as that one.

`--from-run` needs no engine: it fits the table to the engine steps that runs of the recipe recorded.
"""

import argparse
import itertools
import json
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

import numpy as np
from tqdm import tqdm

from sam.command import Parser, run_command
from sam.reading import one_line
from sam.switch.step_cost import NOISE, StepCost

logger = logging.getLogger(__name__)

ROUNDS = 3
# Of a cell's steps. With three rounds it lies among undisturbed steps even if two were disturbed, and unlike the
# fastest step it does not depend on a single one.
PERCENTILE = 25


@dataclass(frozen=True)
class Grid:
    """Axes of the cells [n, m, c]: running requests, draft tokens of each, tokens of each before the step; rising."""

    requests: list[int]
    drafts: list[int]
    context: list[int]

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of requests, drafts and contexts."""
        return len(self.requests), len(self.drafts), len(self.context)

    def table(self, cells: np.ndarray, fingerprint: dict[str, str | int] | None = None, source: str = "") -> StepCost:
        """Make a table of the cells; ValueError for axes that none can have, or milliseconds that contradict."""
        axes = np.array(self.requests), np.array(self.drafts) + 1, np.array(self.context)
        return StepCost(*axes, cells, fingerprint or {}, source)


def measure_cells(engine, grid: Grid) -> np.ndarray:
    """Measure all cells.

    Args:
        engine: sam.vllm.bench.engine.ProfiledEngine, or another one with its `start`, `steps` and `stop`.

    Returns:
        float64 [n, m, c], milliseconds of a step; none is above that of more requests or drafts.
    """
    steps: dict[tuple[int, ...], list[float]] = {place: [] for place in np.ndindex(grid.shape)}
    with tqdm(total=ROUNDS * len(steps), unit="sample", desc="step costs") as bar:
        for _ in range(ROUNDS):
            for (c, context), (i, requests) in itertools.product(enumerate(grid.context), enumerate(grid.requests)):
                engine.start(requests, context)
                for j, drafts in enumerate(grid.drafts):
                    steps[i, j, c] += engine.steps(drafts)
                    bar.update()
                engine.stop()
    cells = np.array([np.percentile(of_cell, PERCENTILE) for of_cell in steps.values()]).reshape(grid.shape)
    rising = np.minimum.accumulate(np.minimum.accumulate(cells[::-1, ::-1], axis=0), axis=1)[::-1, ::-1]
    if disturbed := int((rising < (1.0 - NOISE) * cells).sum()):
        logger.warning(
            "%d of %d step costs came out above one of more work and count as that one: something else ran; where they "
            "are many, measure again with nothing else running",
            *(disturbed, cells.size),
        )
    return rising


def measure(options: argparse.Namespace) -> StepCost:
    """Measure the grid on an engine, with a progress bar."""
    from sam.vllm.bench.engine import ProfiledEngine

    grid = Grid(options.requests, options.drafts, options.context)
    grid.table(np.ones(grid.shape))  # what is wrong with the axes, before minutes are spent on them
    with one_line(f"--engine {options.engine}", "expected a JSON object of vLLM's engine arguments"):
        arguments = dict(json.loads(options.engine))
    arguments = {"max_num_seqs": max(options.requests), "max_model_len": max(options.context) + 1024, **arguments}
    engine = ProfiledEngine(options.model, max(max(options.drafts), 1), **arguments)
    return grid.table(measure_cells(engine, grid), engine.fingerprint(), f"measured by sam profile, {date.today()}")


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


def as_text(table: StepCost) -> str:
    """Lay out milliseconds by requests and tokens per request, at the shortest and the longest context."""
    lines = []
    for c in sorted({0, len(table.context) - 1}):
        lines.append(f"milliseconds a step, context {table.context[c]}; columns: tokens per request")
        lines.append("requests " + "".join(f"{tokens:8}" for tokens in table.tokens_per_request))
        for i, requests in enumerate(table.requests):
            lines.append(f"{requests:8} " + "".join(f"{ms:8.2f}" for ms in table.milliseconds[i, :, c]))
    return "\n".join(lines)


def rising(text: str) -> list[int]:
    """Parse numbers from 0 that are separated by commas; returns them sorted."""
    values = sorted({int(part) for part in text.split(",")})
    if values[0] < 0:
        raise argparse.ArgumentTypeError(f"{text}: expected numbers from 0")
    return values


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="sam profile", description=__doc__.split(":")[0] + ".")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="folder or name of the model to make an engine of")
    source.add_argument("--from-run", nargs="+", type=Path, metavar="RUN_DIR", help="recorded runs to fit")
    parser.add_argument("--output", type=Path, default=Path("step_cost.json"))
    parser.add_argument("--requests", type=rising, default=rising("1,2,4,8,16,32,64"))
    parser.add_argument("--drafts", type=rising, default=rising("0,1,2,3,5,8"), help="draft tokens of each request")
    parser.add_argument("--context", type=rising, default=rising("64,512"), help="tokens before the step")
    parser.add_argument("--engine", default='{"enforce_eager": true}', help="vLLM's engine arguments, as JSON")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")

    def shown() -> Iterator[str]:
        options = parser.parse_args(arguments)
        table = fit_recorded(options.from_run) if options.from_run else measure(options)
        table.save(options.output)
        yield from (as_text(table), table.source)
        if not table.fingerprint:
            yield "no fingerprint, since runs record no engine: one of any model or device will take this table"
        yield f"use it with speculation.policy=goodput speculation.step_cost={options.output.resolve()}"

    return run_command(shown, errors=(RuntimeError, ValueError, OSError))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
