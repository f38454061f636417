"""Verify steps with several paths of draft tokens, drawn for simulated requests, and goodput's choice of paths."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sam.drafting.mixing_weights import make_learned
from sam.jit import compiled
from sam.record.responses import Recording
from sam.replay.paths import Steps, play_group, product_memory
from sam.simulate.acceptance import CELL, EDGES, MIN_RECORDS, POSITIONS, SIBLINGS, DrawnDrafts, draw_records
from sam.switch.goodput import Goodput
from sam.switch.step_cost import StepCost

ROWS, TREE = "rows", "tree"


@dataclass(frozen=True)
class PathAcceptance:
    """Verify steps with several paths, by level of siblings and range of positions (sam.simulate.acceptance).

    Attributes:
        cells: CELL [levels, ranges].
        steps: the records that cells count.
    """

    cells: np.ndarray
    steps: Steps

    def level_of(self, seen: np.ndarray) -> np.ndarray:
        """int64 [n]: the nearest level, by ratio, for each number of siblings."""
        return np.abs(np.log(seen[:, None] / np.array(SIBLINGS[: len(self.cells)]))).argmin(axis=1)


def measure_paths(recording: Recording, paths: int, k: int, progress: Callable[[int], object]) -> PathAcceptance:
    """Draft up to `paths` paths of `k` tokens on a recording, for all samples of a prompt at once.

    Args:
        progress: called with the response tokens replayed since the last call.
    """
    most = max(len(samples) for samples in recording.responses)
    levels = [n for i, n in enumerate(SIBLINGS) if i == 0 or SIBLINGS[i - 1] < most]
    cells, found, count = np.zeros((len(levels), len(POSITIONS)), CELL), [], 0
    for level, together in enumerate(levels):
        learned, memory, parts = make_learned(), product_memory(), []
        for prompt, samples in zip(recording.prompts, recording.responses, strict=True):
            for first in range(0, len(samples), together):
                part = samples[first : first + together]
                parts.append(play_group(learned, memory, prompt, [], part, (paths, paths * k, k), at_once=True))
                progress(sum(map(len, part)))
        steps = Steps(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
        ranges = np.searchsorted(EDGES, steps.position, side="right") - 1
        for i in range(len(POSITIONS)):
            rows = np.flatnonzero(ranges == i)
            if len(rows) < MIN_RECORDS and i:
                cells[level, i] = cells[level, i - 1]
                continue
            cells[level, i] = count, len(rows)
            found.append(Steps(*(array[rows] for array in steps)))
            count += len(rows)
    return PathAcceptance(cells, scaled(Steps(*(np.concatenate(arrays) for arrays in zip(*found, strict=True)))))


def scaled(steps: Steps) -> Steps:
    """The steps with the probabilities of further paths' own tokens scaled to how often they were right."""
    paths, depth = steps.acceptance.shape[1:]
    own = (np.arange(depth) >= steps.shared[:, :, None]) & (np.arange(paths)[:, None] > 0)
    right = own & (np.arange(depth) < steps.accepted[:, :, None])
    expected = steps.acceptance[own].sum(dtype=np.float64)
    factor = right.sum() / expected if expected > 0 else 1.0
    return steps._replace(acceptance=np.where(own, factor * steps.acceptance, steps.acceptance).astype(np.float32))


class DrawnPaths(DrawnDrafts):
    """As DrawnDrafts, with a draft for each path of each request: those of the first path, of the second, and so on.

    A further path's draft has its own tokens alone, with their probabilities.
    """

    def __init__(self, table: PathAcceptance, levels: np.ndarray, costs: str, seed: int = 0):
        self._table, self._levels, self._seed, self._costs = table, levels, seed, costs
        self._records = np.zeros(1, np.int64)

    @property
    def requests(self) -> int:
        """Requests for which drafts were last drawn."""
        return len(self._records)

    @property
    def overhead(self) -> np.ndarray:
        """int64 [drafts]: tokens that each draft just drawn costs beside its own, if it is verified."""
        shared = self._shared()
        return shared + (np.arange(len(shared)) >= self.requests) if self._costs == ROWS else np.zeros_like(shared)

    def _shared(self) -> np.ndarray:
        return self._table.steps.shared[self._records].T.ravel().astype(np.int64)

    def draft(self, requests, generated, budgets, min_acceptance):
        table = self._table
        self._records = draw_records(requests, generated, self._levels, table.cells, self._seed)
        steps = table.steps
        # Requests that have no token yet get no draft.
        lengths = np.where(budgets[:, None] > 0, steps.lengths[self._records], 0).astype(np.int64)
        shared, acceptance = steps.shared[self._records].astype(np.int64), steps.acceptance[self._records]
        return own_tokens(lengths, shared, acceptance, min_acceptance)

    def verify(self, lengths):
        """int64 [requests]: tokens accepted if `lengths` tokens of each draft are verified, overhead included."""
        steps, shape = self._table.steps, (self._table.steps.lengths.shape[1], len(self._records))
        reached = np.where(lengths > 0, lengths - self.overhead + self._shared(), 0).reshape(shape)
        return np.minimum(reached, steps.accepted[self._records].T).max(axis=0).astype(np.int64)


@compiled
def own_tokens(lengths, shared, acceptance, least):
    """Probabilities and offsets of the own tokens of each path, path by path, each cut before a token below `least`."""
    requests, paths, depth = acceptance.shape
    offsets = np.zeros(requests * paths + 1, np.int64)
    kept, end = np.empty(requests * paths * depth, np.float32), 0
    for path in range(paths):
        for i in range(requests):
            for j in range(shared[i, path], lengths[i, path]):
                if acceptance[i, path, j] < least:
                    break
                kept[end] = acceptance[i, path, j]
                end += 1
            offsets[path * requests + i + 1] = end
    return kept[:end], offsets


class GoodputOfPaths(Goodput):
    """Goodput that is given drafts and further paths at once.

    Args:
        k: tokens of a path.
        drafting: whose `overhead` says what the drafts just drawn cost beside their tokens.
    """

    def __init__(self, k: int, paths: int, step_cost: StepCost, drafting: DrawnPaths):
        super().__init__(k, step_cost, paths=paths)
        self._drafting = drafting

    def choose(self, state, acceptance, offsets):
        overhead, requests = self._drafting.overhead, self._drafting.requests
        if not overhead.any():  # a tree: single tokens are chosen, of whichever path
            return super().choose(state, acceptance, offsets)
        first = offsets[requests]
        drafts = super().choose(state, acceptance[:first], offsets[: requests + 1])
        overhead = overhead[requests:]
        own = self.choose_paths(state, int(drafts.sum()), acceptance[first:], offsets[requests:] - first, overhead)
        if own.any() and not self._on:
            self._on, self._cool_down, self._declined = True, 0, 0
        return np.concatenate([drafts, np.where(own > 0, own + overhead, 0)])
