"""Step costs: milliseconds of an engine step by requests, tokens per request and context; checked, saved, looked up."""

import json
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np

from sam.reading import json_object, one_line
from sam.record import replacing

HOW_TO_MEASURE = "measure it again with sam profile"
AXES = ("requests", "tokens_per_request", "context")
LARGEST_RATIO = 1e5  # between two cells of one table: beyond it one of them is in another unit
NOISE = 0.2  # share by which a step may come out faster than one with less work, fewer requests or fewer tokens


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of an engine step on a grid, interpolated linearly.

    Beyond the largest context the last value is held. Beyond the most tokens per request the last slope goes on, since
    more tokens are never known to be free. Beyond the most requests each further one takes as long as the mean one of
    the largest batch.

    Attributes:
        requests: int64 [n], requests in the batch, rising.
        tokens_per_request: int64 [m], 1 + draft tokens, rising from 1.
        context: int64 [c], mean tokens of a request, prompt and response, rising.
        milliseconds: float64 [n, m, c], rising with requests and tokens per request.
        fingerprint: str -> str or int, what was measured: model, device, and settings that change the cost.
        source: str, where and when the numbers were measured.

    Raises:
        ValueError: axes that do not rise, or milliseconds that cannot be true; the line says which.

    Example:
        >>> table = StepCost(
        ...     requests=np.array([1, 8]), tokens_per_request=np.array([1, 4]), context=np.array([512]),
        ...     milliseconds=np.array([[[10.0], [13.0]], [[24.0], [48.0]]]),
        ... )
        >>> table.step_ms(requests=8, num_tokens=[8, 20, 40], context=512)  # 0, 12 and 32 draft tokens
        array([24., 36., 56.])
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
                raise ValueError(f"step cost: {name} is empty; {HOW_TO_MEASURE}")
            if axis.dtype.kind not in "iu" or axis[0] < 1 or np.any(np.diff(axis) <= 0):
                raise ValueError(f"step cost: {name}={axis.tolist()}: expected rising integers from 1")
            object.__setattr__(self, name, axis.astype(np.int64))
        if self.tokens_per_request[0] != 1:
            raise ValueError(
                f"step cost: tokens_per_request={self.tokens_per_request.tolist()}: expected to begin with 1, the step "
                "without drafts"
            )
        cells = np.asarray(self.milliseconds, dtype=np.float64)
        if cells.shape != (shape := tuple(len(getattr(self, name)) for name in AXES)):
            raise ValueError(f"step cost: milliseconds of shape {list(cells.shape)}: the axes ask for {list(shape)}")
        if not np.all(np.isfinite(cells)) or cells.min() <= 0 or cells.max() > LARGEST_RATIO * cells.min():
            raise ValueError(
                f"step cost: milliseconds from {cells.min():g} to {cells.max():g}: expected positive times within a "
                f"factor of {LARGEST_RATIO:g}; {HOW_TO_MEASURE}"
            )
        # Noise must not make more work look cheaper.
        slowest = np.maximum.accumulate(np.maximum.accumulate(cells, axis=0), axis=1)
        for i, j, c in np.argwhere(cells < (1.0 - NOISE) * slowest)[:1]:
            less = cells[: i + 1, : j + 1, c]
            fewer, shorter = np.unravel_index(np.argmax(less), less.shape)
            raise ValueError(
                f"step cost: {self._work(i, j)} take {cells[i, j, c]:.3g} ms at context {self.context[c]}, more than "
                f"{NOISE:.0%} faster than less work ({self._work(fewer, shorter)}: {less.max():.3g} ms): "
                f"{HOW_TO_MEASURE}, with nothing else running"
            )
        object.__setattr__(self, "milliseconds", slowest)

    def _work(self, i: int, j: int) -> str:
        return f"{self.requests[i]} requests x {self.tokens_per_request[j]} tokens"

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a table that `save` or `sam profile` wrote.

        Raises:
            ValueError: no such file, not a table, or a table whose milliseconds cannot be true.
        """
        if not path.is_file():
            raise ValueError(f"{path}: no such file; {HOW_TO_MEASURE} --output {path}")
        with one_line(str(path), f"not a step-cost table, {HOW_TO_MEASURE}"):
            content = json_object(path)
            arrays = [np.array(content[name]) for name in (*AXES, "milliseconds")]
            return cls(*arrays, dict(content["fingerprint"]), str(content["source"]))

    def save(self, path: Path) -> None:
        """Write the table as JSON; an older file is replaced only by a complete one."""
        content = {name: getattr(self, name).tolist() for name in (*AXES, "milliseconds")}
        with replacing(path) as partial:
            partial.write_text(json.dumps({"fingerprint": self.fingerprint, "source": self.source, **content}) + "\n")

    def check_fingerprint(self, wanted: dict[str, str | int]) -> None:
        """Raise ValueError unless the table is of this engine; keys that only one of them has are not compared."""
        for key, value in wanted.items():
            if self.fingerprint.get(key, value) != value:
                raise ValueError(
                    f"the step-cost table is of {key}={self.fingerprint[key]}, this engine has {key}={value}: "
                    f"{HOW_TO_MEASURE}"
                )

    def step_ms(self, requests: float, num_tokens: np.ndarray | float, context: float) -> np.ndarray:
        """float64 [n]: milliseconds of steps of `requests` requests, at a mean context.

        Args:
            num_tokens: float [n] or a number, tokens of all requests together, draft tokens included.
        """
        requests = max(1.0, requests)
        i, above, u = _locate(self.requests, requests)
        c, beyond, w = _locate(self.context, context)
        row = self.milliseconds[i] + u * (self.milliseconds[above] - self.milliseconds[i])  # [m, c]
        line = row[:, c] + w * (row[:, beyond] - row[:, c])
        per_request, axis = np.atleast_1d(num_tokens) / requests, self.tokens_per_request
        costs = np.interp(per_request, axis, line)
        if len(axis) > 1:
            slope = (line[-1] - line[-2]) / (axis[-1] - axis[-2])
            costs += slope * np.maximum(0.0, per_request - axis[-1])
        return costs * max(1.0, requests / self.requests[-1])


def _locate(axis: np.ndarray, value: float) -> tuple[int, int, float]:
    """The points below and above `value` and the share of the way between them; held at both ends."""
    below = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 1)
    above = min(below + 1, len(axis) - 1)
    return below, above, float(min(max(value - axis[below], 0) / max(1, axis[above] - axis[below]), 1))


def linear(fixed_ms: float, per_request_ms: float, per_token_ms: float, **description) -> StepCost:
    """A table of fixed_ms + requests x per_request_ms + tokens x per_token_ms, for any context."""
    requests, tokens = np.array([[1], [1024]]), np.array([1, 16])
    cells = fixed_ms + per_request_ms * requests + per_token_ms * (requests * tokens)
    return StepCost(requests.ravel(), tokens, np.array([1]), cells[..., None], **description)
