"""Measures step costs over a grid, on a machine that may run other programs.

Other programs come and go, and make steps slower, never faster. So the grid is measured in rounds, each of which visits
every cell for a few steps: a disturbance meets one round of many cells, not all rounds of one. A cell that comes out
slower than one with more work was disturbed, and is measured again.
"""

import logging
import time
from dataclasses import dataclass

import numpy as np
from tqdm import tqdm

from sam.switch.step_cost import NOISE, StepCost

logger = logging.getLogger(__name__)

ROUNDS = 3
# Of a cell's steps. With three rounds it lies among undisturbed steps even if two were disturbed, and unlike the
# fastest step it does not depend on a single one.
PERCENTILE = 25
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)  # before cells are measured again: what disturbed them may be over by then


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
        """Make a table of the cells.

        Raises:
            ValueError: the axes are not those of a table, or the milliseconds contradict each other.
        """
        axes = np.array(self.requests), np.array(self.drafts) + 1, np.array(self.context)
        return StepCost(*axes, cells, fingerprint or {}, source)


def measure_cells(engine, grid: Grid) -> np.ndarray:
    """Measure all cells; those slower than one with more work are measured again, at most len(PAUSES_S) times.

    Args:
        engine: sam.vllm.bench.profiled_engine.ProfiledEngine, or another one with its `start`, `steps` and `stop`.

    Returns:
        float64 [n, m, c], milliseconds of a step; `Grid.table` refuses those that still contradict each other.
    """
    cells = _measure(engine, grid, np.ones(grid.shape, dtype=bool), "step costs")
    for number, pause in enumerate(PAUSES_S, start=1):
        disturbed = too_slow(cells)
        if not disturbed.any():
            break
        i, j, c = np.argwhere(disturbed)[0].tolist()
        logger.warning(
            "%d of %d step costs are above one of more work, the first is %.3g ms for %d requests x %d tokens at "
            "context %d: they are measured again, %d of at most %d times",
            *(disturbed.sum(), cells.size, cells[i, j, c], grid.requests[i], grid.drafts[j] + 1, grid.context[c]),
            *(number, len(PAUSES_S)),
        )
        time.sleep(pause)
        cells = np.fmin(cells, _measure(engine, grid, disturbed, f"again, {number} of {len(PAUSES_S)}"))
    return cells


def _measure(engine, grid: Grid, chosen: np.ndarray, title: str) -> np.ndarray:
    """float64 [n, m, c]: milliseconds of the `chosen` cells (bool [n, m, c]), nan elsewhere."""
    steps: dict[tuple[int, int, int], list[float]] = {tuple(place): [] for place in np.argwhere(chosen).tolist()}
    with tqdm(total=ROUNDS * len(steps), unit="sample", desc=title) as bar:
        for _ in range(ROUNDS):
            for c, i in np.argwhere(chosen.any(axis=1).T).tolist():
                engine.start(grid.requests[i], grid.context[c])
                for j in np.flatnonzero(chosen[i, :, c]).tolist():
                    steps[i, j, c] += engine.steps(grid.drafts[j])
                    bar.update()
                engine.stop()
    cells = np.full(grid.shape, np.nan)
    for place, milliseconds in steps.items():
        cells[place] = np.percentile(milliseconds, PERCENTILE)
    return cells


def too_slow(cells: np.ndarray) -> np.ndarray:
    """bool [n, m, c]: whether some cell with more work is faster by more than NOISE."""
    most_work_first = cells[::-1, ::-1]
    fastest = np.minimum.accumulate(np.minimum.accumulate(most_work_first, axis=0), axis=1)
    return fastest[::-1, ::-1] < (1.0 - NOISE) * cells
