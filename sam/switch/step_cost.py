"""What an engine step costs, by requests, tokens per request and context length: measured, saved, looked up."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

HOW_TO_MEASURE = "measure it anew with python -m sam.profile"
AXES = ("requests", "tokens_per_request", "context")
LARGEST_RATIO = 1e5  # between two cells of one table: beyond it one of them is in another unit
NOISE = 0.2  # share by which a step may come out faster than one with less work, fewer requests or fewer tokens


class StepCostError(ValueError):
    """A table that cannot be used; one line says why."""


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of an engine step on a grid, linear between its points and held beyond them, but for tokens: there
    the last slope goes on, since a step with more tokens is never known to be free.

    Attributes:
        requests: int64 [n], in the batch, rising.
        tokens_per_request: int64 [m], 1 + drafts, rising from 1.
        context: int64 [c], mean tokens of a request, rising.
        milliseconds: float64 [n, m, c].
        fingerprint: of what was measured: model, device and whatever else decides on the cost.
        source: how and when the figures came about.
    """

    requests: np.ndarray
    tokens_per_request: np.ndarray
    context: np.ndarray
    milliseconds: np.ndarray
    fingerprint: dict[str, str | int] = field(default_factory=dict)
    source: str = ""

    def __post_init__(self) -> None:
        for name in AXES:
            axis = np.asarray(getattr(self, name))
            if axis.ndim != 1 or axis.size == 0:
                raise StepCostError(f"step cost: {name} is empty; {HOW_TO_MEASURE}")
            if axis.dtype.kind not in "iu" or axis[0] < 1 or np.any(np.diff(axis) <= 0):
                raise StepCostError(f"step cost: {name}={axis.tolist()}: expected rising integers from 1")
            object.__setattr__(self, name, axis.astype(np.int64))
        if self.tokens_per_request[0] != 1:
            raise StepCostError(
                f"step cost: tokens_per_request={self.tokens_per_request.tolist()}: expected to begin with 1, the step "
                "without drafts"
            )
        self._check_cells(np.asarray(self.milliseconds, dtype=np.float64))

    def _check_cells(self, cells: np.ndarray) -> None:
        shape = (len(self.requests), len(self.tokens_per_request), len(self.context))
        if cells.shape != shape:
            raise StepCostError(f"step cost: milliseconds of shape {list(cells.shape)}: the axes ask for {list(shape)}")
        if not np.all(np.isfinite(cells)) or cells.min() <= 0 or cells.max() > LARGEST_RATIO * cells.min():
            raise StepCostError(
                f"step cost: milliseconds from {cells.min():g} to {cells.max():g}: expected positive times within a "
                f"factor of {LARGEST_RATIO:g}; {HOW_TO_MEASURE}"
            )
        slowest = np.maximum.accumulate(np.maximum.accumulate(cells, axis=0), axis=1)
        if len(too_fast := np.argwhere(cells < (1.0 - NOISE) * slowest)):
            raise StepCostError(
                f"step cost: {self._contradiction(cells, *too_fast[0])}: {HOW_TO_MEASURE}, with nothing else running"
            )
        # Noise must not make more work look cheaper.
        object.__setattr__(self, "milliseconds", slowest)

    def _contradiction(self, cells: np.ndarray, i: int, j: int, c: int) -> str:
        """What is wrong with a cell that is too fast, in words."""
        less = cells[: i + 1, : j + 1, c]
        fewer, shorter = np.unravel_index(np.argmax(less), less.shape)
        fast = f"{self.requests[i]} requests x {self.tokens_per_request[j]} tokens take {cells[i, j, c]:.3g} ms"
        slow = f"{self.requests[fewer]} requests x {self.tokens_per_request[shorter]} tokens: {less.max():.3g} ms"
        return f"{fast} at context {self.context[c]}, more than {NOISE:.0%} faster than less work ({slow})"

    @classmethod
    def load(cls, path: Path) -> StepCost:
        """Read a table that `save` or `python -m sam.profile` wrote.

        Raises:
            StepCostError: no file, not a table, or one whose figures cannot be true.
        """
        if not path.is_file():
            raise StepCostError(f"{path}: no such file; {HOW_TO_MEASURE} --output {path}")
        try:
            content = json.loads(path.read_text())
            arrays = [np.array(content[name]) for name in (*AXES, "milliseconds")]
            rest = dict(content["fingerprint"]), str(content["source"])
        except (ValueError, KeyError, TypeError) as error:
            raise StepCostError(f"{path}: not a step-cost table ({error!r}); {HOW_TO_MEASURE}") from error
        try:
            return cls(*arrays, *rest)
        except StepCostError as error:
            raise StepCostError(f"{path}: {error}") from None

    def save(self, path: Path) -> None:
        """Write as JSON; a complete file replaces an old one at once."""
        content = {name: getattr(self, name).tolist() for name in (*AXES, "milliseconds")}
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps({"fingerprint": self.fingerprint, "source": self.source, **content}) + "\n")
        partial.replace(path)

    def check_fingerprint(self, wanted: dict[str, str | int]) -> None:
        """Raise StepCostError if the table is of another model, device or setting; keys it lacks are not compared."""
        for key, value in wanted.items():
            if key in self.fingerprint and self.fingerprint[key] != value:
                raise StepCostError(
                    f"the step-cost table is of {key}={self.fingerprint[key]}, this engine has {key}={value}: "
                    f"{HOW_TO_MEASURE}"
                )

    def of(self, requests: float, rows: np.ndarray | float, context: float) -> np.ndarray:
        """Milliseconds of steps with `requests` requests that verify `rows` tokens in all.

        Args:
            rows: float [n] or a number, at least `requests`.
            context: mean tokens of a request.

        Returns:
            float64 [n].
        """
        requests = max(1.0, float(requests))
        by_request = _between(self.milliseconds, self.requests, requests)
        line = _between(np.moveaxis(by_request, 1, 0), self.context, context)
        per_request = np.atleast_1d(np.asarray(rows, dtype=np.float64)) / requests
        cost = np.interp(per_request, self.tokens_per_request, line)
        if len(line) > 1:
            last = self.tokens_per_request[-1]
            slope = (line[-1] - line[-2]) / (last - self.tokens_per_request[-2])
            cost += slope * np.maximum(0.0, per_request - last)
        # More requests than were measured: each brings what the last ones brought.
        if requests > self.requests[-1]:
            cost *= requests / self.requests[-1]
        return cost


def _between(cells: np.ndarray, axis: np.ndarray, value: float) -> np.ndarray:
    """`cells` at `value` of their first axis, linear between points and held beyond them."""
    at = float(np.interp(value, axis, np.arange(len(axis))))
    low = int(at)
    high = min(low + 1, len(axis) - 1)
    return cells[low] + (at - low) * (cells[high] - cells[low])


def non_negative_least_squares(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Least squares with the most negative term left out until none is; for the few terms of a step's cost that does.

    Args:
        columns: float [n, terms]; target: float [n].

    Returns:
        float64 [terms], none negative.
    """
    used = list(range(columns.shape[1]))
    terms = np.linalg.lstsq(columns, target, rcond=None)[0]
    while len(used) > 1 and terms.min() < 0:
        del used[int(np.argmin(terms))]
        terms = np.linalg.lstsq(columns[:, used], target, rcond=None)[0]
    result = np.zeros(columns.shape[1])
    result[used] = np.maximum(terms, 0.0)
    return result


def linear(fixed_ms: float, per_request_ms: float, per_token_ms: float, **description) -> StepCost:
    """A table of fixed + requests x per_request + tokens x per_token milliseconds, whatever the context."""
    requests, tokens = np.array([1, 1024]), np.array([1, 16])
    rows = requests[:, None] * tokens[None, :]
    cells = fixed_ms + per_request_ms * requests[:, None] + per_token_ms * rows
    return StepCost(requests, tokens, np.array([1]), cells[..., None], **description)
