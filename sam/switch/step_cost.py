"""Step costs: milliseconds of an engine step by requests, tokens per request and context; checked, saved, looked up.

What a step is expected to take is the table, corrected by measured steps, for all data-parallel ranks.
"""

import json
from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Self

import numpy as np

from sam.reading import LARGEST_TOKEN, ReadError, Values, array_of, json_object, one_line
from sam.record import replacing

HOW_TO_MEASURE = "measure it again with sam profile"
AXES = ("requests", "tokens_per_request", "context")
MILLISECONDS = Values("milliseconds", "float64", dimensions=3)

MEMORY_STEPS = 128.0  # steps after which a step has lost most of its weight
# Prior standard deviations, as shares of what the table says: of what all steps share (the cheapest), of a request, of
# a draft token, of a step with drafts (of the cheapest); the second and third never less than a share of the cheapest.
FIXED_STD = 1.0
PER_REQUEST_STD = 1.0
PER_DRAFT_TOKEN_STD = 0.5
SPECULATING_STD = 0.5
MIN_PER_REQUEST_STD = 0.01
MIN_PER_DRAFT_TOKEN_STD = 0.001
# The first weighs no more than so many steps: what all steps share must not reach the tokens' price.
MAX_FIXED_PRIOR = 1.0
# Where the table holds forward passes only, guesses: the share of the cheapest step that drafting and verifying take,
# without which an engine that drafts in every step never learns of it; and the share of what a request adds that a
# draft token adds too, since it is attended from and sampled from as well.
UNMEASURED_SPECULATING = 0.05
UNMEASURED_PER_DRAFT_TOKEN = 0.5
MIN_NOISE = 0.01  # share of the cheapest step: steps that never differ tell nothing about terms they have not shown
OUTLIER = 4.0  # times the expected milliseconds: such a step was held up by something else and is not learnt from
MAX_OUTLIERS = 8  # in a row: then the shortest of them is learnt from
# All of the first steps are learnt from, later one every so many milliseconds: an update takes 0.1 ms.
ALWAYS_LEARN_STEPS = 64
LEARN_INTERVAL_MS = 50.0
CONTEXT_BUCKET = 256  # tokens by which the mean context may grow before costs are looked up again
KEPT_LOOK_UPS = 256
MIN_SHARE = 0.1  # of the table's milliseconds: no step is thought to take less


@dataclass(frozen=True)
class StepState:
    """The engine step in which drafts would be verified.

    Attributes:
        running: int, requests in the batch, decoding or prefilling.
        prefilling: int, of these, those whose prompt has not been read to its end.
        context: float, mean tokens of a running request, prompt and response; 0.0 if unknown.
        max_num_tokens_other_dp_ranks: int, tokens of the largest batch among the other data-parallel ranks, draft
            tokens included; all ranks wait for it. `plan` and `choose` are given that of the previous step, `observe`
            that of the step itself. 0 if no other rank is known to have more than this one.
        steps_since_plan: int, engine steps since the last call of `plan`, this one included.
    """

    running: int
    prefilling: int = 0
    context: float = 0.0
    max_num_tokens_other_dp_ranks: int = 0
    steps_since_plan: int = 1


@dataclass(frozen=True)
class StepCost:
    """Milliseconds of an engine step on a grid, interpolated linearly.

    Beyond the largest context the last value is held, beyond the most tokens per request the last slope goes on, and
    beyond the most requests each further one takes as long as the mean one of the largest batch.

    Attributes:
        requests: int64 [n], requests in the batch, rising.
        tokens_per_request: int64 [m], 1 + draft tokens, rising from 1.
        context: int64 [c], mean tokens of a request, prompt and response, rising.
        milliseconds: float64 [n, m, c], rising with requests and tokens per request.
        source: str, where and when the numbers were measured.

    Raises:
        ValueError: axes or milliseconds that cannot be true.

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
    source: str = ""

    def __post_init__(self) -> None:
        for name in AXES:
            axis = np.asarray(getattr(self, name))
            most = 1 if name == "tokens_per_request" else np.inf
            is_rising = axis.ndim == 1 and axis.dtype.kind in "iu" and axis.size and (np.diff(axis) > 0).all()
            if not is_rising or not 1 <= axis[0] <= most or axis[-1] > LARGEST_TOKEN:
                raise ValueError(
                    f"step cost: {name}={axis.tolist()}: expected rising integers from 1; {HOW_TO_MEASURE}"
                )
            object.__setattr__(self, name, axis.astype(np.int64))
        try:
            cells = array_of(np.asarray(self.milliseconds), "milliseconds", MILLISECONDS)
        except ReadError as error:  # of no file yet
            raise ValueError(f"step cost: {error}") from error
        shape = [len(getattr(self, name)) for name in AXES]
        if list(cells.shape) != shape:
            raise ValueError(f"step cost: milliseconds of shape {list(cells.shape)}: the axes ask for {shape}")
        slowest = np.maximum.accumulate(np.maximum.accumulate(cells, axis=0), axis=1)
        if not np.isfinite(cells).all() or cells.min() <= 0 or not np.allclose(cells, slowest):
            raise ValueError(
                f"step cost: milliseconds from {cells.min():g} to {cells.max():g}: expected positive times that rise "
                f"with requests and tokens; {HOW_TO_MEASURE}"
            )
        object.__setattr__(self, "milliseconds", slowest)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a table that `save` or `sam profile` wrote; ValueError if it is none."""
        if not path.is_file():
            raise ValueError(f"{path}: no such file; {HOW_TO_MEASURE} --output {path}")
        with one_line(str(path), f"not a step-cost table, {HOW_TO_MEASURE}"):
            content = json_object(path)
            arrays = [np.array(content[name]) for name in (*AXES, "milliseconds")]
            return cls(*arrays, str(content["source"]))

    def save(self, path: Path) -> None:
        """Write the table as JSON; an older file is replaced only by a complete one."""
        content = {name: getattr(self, name).tolist() for name in (*AXES, "milliseconds")}
        with replacing(path) as partial:
            partial.write_text(json.dumps({"source": self.source, **content}) + "\n")

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
        axis = self.tokens_per_request
        per_request = np.atleast_1d(num_tokens) / requests
        costs = np.interp(per_request, axis, line)
        if len(axis) > 1:
            slope = (line[-1] - line[-2]) / (axis[-1] - axis[-2])
            costs += slope * np.maximum(0.0, per_request - axis[-1])
        return costs * max(1.0, requests / self.requests[-1])


def _locate(axis: np.ndarray, value: float) -> tuple[int, int, float]:
    """The points below and above `value` and the share of the way between them; held at both ends."""
    below = min(max(bisect_right(axis, value) - 1, 0), len(axis) - 1)
    above = min(below + 1, len(axis) - 1)
    share = max(value - axis[below], 0) / max(1, axis[above] - axis[below])
    return below, above, float(min(share, 1))


def linear(fixed_ms: float, per_request_ms: float, per_token_ms: float, **description) -> StepCost:
    """A table of fixed_ms + requests x per_request_ms + tokens x per_token_ms, for any context."""
    requests = np.array([[1], [1024]])
    tokens = np.array([1, 16])
    cells = fixed_ms + per_request_ms * requests + per_token_ms * (requests * tokens)
    return StepCost(requests.ravel(), tokens, np.array([1]), cells[..., None], **description)


class Correction:
    """The milliseconds that steps take beyond a table, learnt from the steps.

    Bayesian linear regression with exponential forgetting (Bishop, Pattern Recognition and Machine Learning, section
    3.3). The table is the prior mean, and weighs the more the noisier the steps are: with a fixed weight a busy
    machine's noise would come out as a price of draft tokens. Noise is what no terms explain: a wrong table is none.

    Args:
        step_cost: the table.
        forward_only: whether it holds forward passes only, without sampling and drafting.

    Attributes:
        terms: float64 [4], of each step, each request, each draft token, and each step with draft tokens (at least 0).
    """

    def __init__(self, step_cost: StepCost, forward_only: bool = False):
        cells = step_cost.milliseconds
        requests = step_cost.requests
        tokens = step_cost.tokens_per_request
        cheapest = float(cells.min())
        per_request = (cells[-1, 0] - cells[0, 0]).mean() / max(1, requests[-1] - requests[0])
        spans = np.maximum(1, requests * (tokens[-1] - tokens[0]))
        per_token = ((cells[:, -1] - cells[:, 0]).mean(axis=1) / spans).max()
        per_request_std = PER_REQUEST_STD * per_request + MIN_PER_REQUEST_STD * cheapest
        per_draft_token_std = PER_DRAFT_TOKEN_STD * per_token + MIN_PER_DRAFT_TOKEN_STD * cheapest
        self._std = np.array([FIXED_STD * cheapest, per_request_std, per_draft_token_std, SPECULATING_STD * cheapest])
        self._mean = np.array([0.0, 0.0, 0.0, UNMEASURED_SPECULATING * cheapest * forward_only])
        self._min_variance = (MIN_NOISE * cheapest) ** 2
        self._share = UNMEASURED_PER_DRAFT_TOKEN * forward_only  # of `per_request`, that a draft token adds too
        self.terms = self._mean
        # Weighted sums over the steps, of products of the four features and the milliseconds beyond the table.
        self._sums = np.zeros((5, 5))
        self._outliers: list[tuple[float, int, int, float]] = []

    def extra_ms(self, requests: int, drafted: float) -> float:
        """Milliseconds beyond the table of a step with `requests` requests and `drafted` draft tokens."""
        fixed, per_request, per_draft_token, speculating = self.terms
        return fixed + per_request * requests + per_draft_token * drafted + (speculating if drafted else 0.0)

    def observe(self, requests: int, drafted: int, table_ms: float, milliseconds: float) -> bool:
        """Learn from a step that took `milliseconds` where the table says `table_ms`; False: it is an outlier."""
        expected = max(0.0, table_ms + self.extra_ms(requests, drafted))
        if milliseconds > OUTLIER * max(expected, 1e-3):
            self._outliers.append((milliseconds, requests, drafted, table_ms))
            if len(self._outliers) < MAX_OUTLIERS:
                return False
            milliseconds, requests, drafted, table_ms = min(self._outliers)
        self._outliers.clear()
        step = np.array([1.0, requests + self._share * drafted, drafted, drafted > 0, milliseconds - table_ms])
        self._sums = (1.0 - 1.0 / MEMORY_STEPS) * self._sums + np.outer(step, step)
        self.terms = self._fit()
        return True

    def _fit(self) -> np.ndarray:
        information = self._sums[:4, :4]
        target = self._sums[:4, 4]
        squares = self._sums[4, 4]
        unexplained = squares - target @ np.linalg.solve(information + np.eye(4), target)
        weights = max(unexplained / self._sums[0, 0], self._min_variance) / self._std**2
        weights[0] = min(weights[0], MAX_FIXED_PRIOR)
        matrix = information + np.diag(weights)
        right = target + weights * self._mean
        terms = np.linalg.solve(matrix, right)
        if terms[3] < 0.0:
            # Where every step has drafts the steps tell the sum of fixed and speculating, and not which is which: a
            # table that is far too high would come out as a reward of drafts.
            terms = np.append(np.linalg.solve(matrix[:3, :3], right[:3]), 0.0)
        terms[2] += self._share * terms[1]
        return terms


class ExpectedCost:
    """Milliseconds of the steps that StepStates name; the arguments are those of sam.switch.policies.Goodput.

    Under data parallelism all ranks wait for the fullest: a step never takes less than that one's, so that drafts are
    free up to there.
    """

    def __init__(self, num_speculative_tokens: int, graph_sizes: tuple[int, ...], paths: int):
        self._row = num_speculative_tokens + 1  # tokens of a request with a whole draft
        self._most_draft_tokens = paths * self._row - 1  # of a request
        self._graph_sizes = np.array(sorted(graph_sizes), dtype=np.int64)
        self._kept = lru_cache(KEPT_LOOK_UPS)(self._corrected)  # until more is learnt

    def use(self, step_cost: StepCost, forward_only: bool) -> None:
        """Begin with a table; the arguments are those of Correction."""
        self.step_cost = step_cost
        self.correction = Correction(step_cost, forward_only)
        self._observed_steps = 0
        self._ms_since_update = 0.0
        self._kept.cache_clear()

    def of(self, state: StepState) -> tuple[np.ndarray, float]:
        """float64 [n + 1]: milliseconds of a step with 0 to n draft tokens; and the acceptance below which no draft
        token pays."""
        return self._kept(state.running, int(state.context) // CONTEXT_BUCKET, state.max_num_tokens_other_dp_ranks)

    def _corrected(self, running: int, bucket: int, num_tokens_other: int) -> tuple[np.ndarray, float]:
        # No step is faster than one with fewer draft tokens, or than the fullest other rank's.
        drafted = np.arange(running * self._most_draft_tokens + 1)
        _, _, per_draft_token, speculating = self.correction.terms
        table = self._look_up(running, running + drafted, bucket)
        cost = table + self.correction.extra_ms(running, 0) + per_draft_token * drafted
        cost[1:] += speculating
        cost = np.maximum(cost, MIN_SHARE * table)
        if num_tokens_other:
            cost[0] = max(cost[0], self._min_ms_other_ranks(num_tokens_other, bucket))
        cost = np.maximum.accumulate(cost)
        slopes = np.maximum(0.0, cost[1:] - cost[0] - speculating) / drafted[1:]
        return cost, running * float(slopes.min(initial=np.inf)) / cost[0]

    def observe(self, state: StepState, drafted: int, milliseconds: float, is_wanted: bool) -> None:
        """Learn from a step that no other rank can have held up, if it is `is_wanted` or the last one was long ago."""
        self._observed_steps += 1
        self._ms_since_update += milliseconds
        is_due = self._observed_steps <= ALWAYS_LEARN_STEPS or self._ms_since_update >= LEARN_INTERVAL_MS
        num_tokens_other = state.max_num_tokens_other_dp_ranks
        bucket = int(state.context) // CONTEXT_BUCKET
        if state.prefilling or num_tokens_other > state.running + drafted or not (is_due or is_wanted):
            return
        most = np.array([min(drafted, state.running * self._most_draft_tokens)])
        table_ms = float(self._look_up(state.running, state.running + most, bucket)[0])
        # Another rank's tokens may be of more requests than this one's, or be drafts to a larger part.
        counts = (num_tokens_other, -(-num_tokens_other // self._row)) if num_tokens_other else ()
        if any(self._look_up(count, np.array([num_tokens_other]), bucket)[0] > table_ms for count in counts):
            return
        if self.correction.observe(state.running, drafted, table_ms, milliseconds):
            self._ms_since_update = 0.0
            self._kept.cache_clear()

    def _look_up(self, requests: int, num_tokens: np.ndarray, bucket: int) -> np.ndarray:
        """float64 [n]: the table's milliseconds by tokens (int64 [n]), for a context in the middle of its bucket."""
        sizes = self._graph_sizes
        if len(sizes):
            at = np.searchsorted(sizes, num_tokens)
            num_tokens = np.where(at < len(sizes), sizes[np.minimum(at, len(sizes) - 1)], num_tokens)
        return self.step_cost.step_ms(requests, num_tokens, (bucket + 0.5) * CONTEXT_BUCKET)

    def _min_ms_other_ranks(self, num_tokens: int, bucket: int) -> float:
        """Milliseconds that the fullest other rank takes at least, with this rank's mean context."""
        # As many of its tokens as can be are drafts, and left out: they can be cheaper than requests or dearer, and
        # ranks that took each other's drafts for something to wait for would go on drafting because the others do.
        # Requests that the table does not reach are left out too: they are its extrapolation, and may be a prompt.
        requests = min(-(-num_tokens // self._row), int(self.step_cost.requests[-1]))
        table_ms = float(self._look_up(requests, np.array([requests]), bucket)[0])
        return max(table_ms + self.correction.extra_ms(requests, 0), MIN_SHARE * table_ms)
