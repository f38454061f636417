"""Whether a draft model runs in a step, for which requests, and how many tokens it drafts: before any of its passes.

The plan is goodput's own (sam.switch.goodput): a number of passes is as good as the best choice of draft tokens that it
allows, with the time of the passes added to every step that verifies any. No passes at all is one of the choices.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from sam.switch.goodput import MIN_GAIN_OFF, choose_lengths

UPDATE = 0.1  # weight of the last passes in the correction of their time
# Steps over which the time of reading what was missed is spread in a plan. One step alone would never pay for it, and
# what is missed grows with every step that the draft model rests.
CATCH_UP_STEPS = 32


@dataclass(frozen=True)
class Passes:
    """What a draft model is to do.

    Attributes:
        count: int, passes, each of which brings one draft token; 0: it rests.
        wanted: bool [requests], which requests it drafts for.
        milliseconds: float, the time that the passes are expected to take.
    """

    count: int
    wanted: np.ndarray
    milliseconds: float = 0.0


class PassCost:
    """Milliseconds of a draft model's passes by tokens: a measured table, times a factor that its passes teach.

    Args:
        sizes: int [n], tokens of the measured passes, rising.
        milliseconds: float [n].

    Example:
        >>> cost = PassCost(np.array([1, 101]), np.array([1.0, 2.0]))
        >>> cost.ms(51), cost.ms(201)  # beyond the table the last slope goes on
        (1.5, 3.0)
        >>> cost.observe(expected=1.0, measured=2.0)
        >>> cost.ms(51)
        1.65
    """

    def __init__(self, sizes: np.ndarray, milliseconds: np.ndarray):
        self._sizes, self._milliseconds = sizes, np.maximum.accumulate(milliseconds)
        self._factor = 1.0

    def ms(self, num_tokens: int) -> float:
        """Of one pass over `num_tokens` tokens; 0 without any."""
        if num_tokens == 0:
            return 0.0
        value = np.interp(num_tokens, self._sizes, self._milliseconds)
        if num_tokens > self._sizes[-1] and len(self._sizes) > 1:
            rise = self._milliseconds[-1] - self._milliseconds[-2]
            value += (num_tokens - self._sizes[-1]) * rise / (self._sizes[-1] - self._sizes[-2])
        return float(round(self._factor * value, 6))

    def of_passes(self, count: int, requests: int, missing: int) -> float:
        """Of `count` passes, the first of which reads `missing` tokens, the others one of each request."""
        return self.ms(missing) + (count - 1) * self.ms(requests) if count else 0.0

    def planned(self, count: int, requests: int, missing: int) -> float:
        """As `of_passes`, with what the first reads beyond a token of each request spread over `CATCH_UP_STEPS`."""
        catching_up = self.ms(missing) - self.ms(requests)
        return self.of_passes(count, requests, requests) + max(0.0, catching_up) / CATCH_UP_STEPS

    def observe(self, expected: float, measured: float) -> None:
        """Learn from passes that were expected to take `expected` milliseconds."""
        if expected > 0:
            ratio = min(10.0, max(0.1, measured / expected))
            self._factor *= 1.0 + UPDATE * (ratio - 1.0)


def most_expected(other: np.ndarray, expected: np.ndarray, count: int) -> np.ndarray:
    """Requests of which a draft model's first `count` tokens bring more accepted tokens than the other source's draft.

    Args:
        other: float [requests], tokens that the other source expects to be accepted.
        expected: float [requests, positions], cumulative acceptance probability of the draft model's tokens.

    Returns:
        bool [requests].
    """
    return expected[:, :count].sum(axis=1) > other


def combined(acceptance, offsets, expected, wanted, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Acceptance and offsets of a batch in which the draft model's first `count` tokens replace some drafts."""
    lengths = np.where(wanted, count, np.diff(offsets))
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    joined = np.empty(ends[-1], np.float32)
    for i, own in enumerate(wanted):
        joined[ends[i] : ends[i + 1]] = expected[i, :count] if own else acceptance[offsets[i] : offsets[i + 1]]
    return joined, ends


def plan_passes(policy: Any, state, drafts, expected, missing, cost: PassCost, most: int, rule=None) -> Passes:
    """The best number of passes, and whom for.

    Args:
        policy: of sam.switch; one without step costs asks for `most` passes.
        state: sam.switch.policy.StepState.
        drafts: the other source's, with `acceptance` float32 [total] and `offsets` int64 [requests + 1].
        expected: float [requests, most], cumulative acceptance probability of the draft model's tokens; 0 where a
            request has no room for one.
        missing: int [requests], tokens that the draft model has yet to read.
        most: passes at most.
        rule: bool [requests], for whom the draft model drafts whatever is expected; None: where it expects more.
    """
    nobody = Passes(0, np.zeros(len(expected), bool))
    if not len(expected):
        return nobody
    ends = np.concatenate([[0.0], np.cumsum(drafts.acceptance, dtype=np.float64)])
    other = ends[drafts.offsets[1:]] - ends[drafts.offsets[:-1]]
    costs = getattr(policy, "step_ms", None)
    step_ms = None if costs is None else costs(state)
    best, best_gain = nobody, 0.0 if step_ms is None else _gain(state, drafts.acceptance, drafts.offsets, step_ms, 0.0)
    for count in [most] if step_ms is None else range(1, most + 1):
        wanted = most_expected(other, expected, count) if rule is None else rule
        wanted = wanted & (expected[:, 0] > 0)
        if not wanted.any():
            continue
        work = count, int(wanted.sum()), int(missing[wanted].sum())
        passes = Passes(count, wanted, cost.of_passes(*work))
        if step_ms is None:
            return passes
        joined = combined(drafts.acceptance, drafts.offsets, expected, wanted, count)
        if (found := _gain(state, *joined, step_ms, cost.planned(*work))) > best_gain:
            best, best_gain = passes, found
    return best


def _gain(state, acceptance, offsets, step_ms, extra_ms: float) -> float:
    """Share by which the best of these drafts raises goodput if making them takes `extra_ms`; 0 if none pays."""
    cost = step_ms.copy()
    cost[1:] += extra_ms
    gain = choose_lengths(acceptance, offsets, state.running, cost, 0.0)[1]
    return gain if gain >= MIN_GAIN_OFF else 0.0
