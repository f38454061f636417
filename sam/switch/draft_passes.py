"""Whether a draft model runs in a step, for which requests, and how many tokens it drafts: before any of its passes.

The plan is goodput's own (sam.switch.policies): a number of passes is as good as the best choice of draft tokens it
allows, with the time of the passes added to every step that verifies any. No passes at all is one of the choices.

That looks at one step. It cannot see that text which the other source does not know may end after a token, when passes
of many tokens are spent on what that source would have known. So what comes of it is measured, too (sam.switch.trials),
and where passes have not paid, nothing is planned.
"""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from sam.jit import compiled
from sam.switch.policies import MIN_GAIN_OFF, choose_lengths
from sam.switch.trials import Trials

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
        reading: float, of these, those that go to text which the draft model has missed.
    """

    count: int
    wanted: np.ndarray
    milliseconds: float = 0.0
    reading: float = 0.0


class PassCost:
    """Milliseconds of a draft model's passes by tokens: a measured table, times a factor that its passes teach.

    Args:
        sizes: int [n], tokens of the measured passes, rising.
        milliseconds: float [n].

    Attributes:
        trials: whether passes have paid; None: that is not measured.

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
        self.trials: Trials | None = Trials(self.ms)
        nothing = np.zeros((0, 1))  # compiled here, so that no engine step waits for it
        best_count(np.zeros(0, np.float32), np.zeros(1, np.int64), nothing, nothing > 0, 1, np.ones(2), np.ones(1), 0.0)

    def ms(self, num_tokens: int) -> float:
        """Of one pass over `num_tokens` tokens; 0 without any."""
        return round(float(self._of_tokens(num_tokens)), 6)

    def _of_tokens(self, num_tokens):
        value = np.interp(num_tokens, self._sizes, self._milliseconds)
        if len(self._sizes) > 1:
            rise = self._milliseconds[-1] - self._milliseconds[-2]
            beyond = np.maximum(0, num_tokens - self._sizes[-1])
            value = value + beyond * rise / (self._sizes[-1] - self._sizes[-2])
        return np.where(np.asarray(num_tokens) > 0, self._factor * value, 0.0)

    def of_passes(self, count: int, requests: int, missing: int) -> float:
        """Of `count` passes, the first of which reads `missing` tokens, the others one of each request."""
        return self.ms(missing) + (count - 1) * self.ms(requests) if count else 0.0

    def planned(self, requests: np.ndarray, missing: np.ndarray) -> np.ndarray:
        """Of 1, 2, ... passes, as `of_passes`, with what the first reads beyond a token of each request spread over
        `CATCH_UP_STEPS`.

        Args:
            requests, missing: int [most], of one pass, of two, ...

        Returns:
            float64 [most].
        """
        each, first = self._of_tokens(requests), self._of_tokens(missing)
        return np.arange(1, len(each) + 1) * each + np.maximum(0.0, first - each) / CATCH_UP_STEPS

    def observe(self, expected: float, measured: float, reading: float = 0.0) -> None:
        """Learn from passes that were expected to take `expected` milliseconds, `reading` of it on what was missed."""
        if expected > 0:
            ratio = min(10.0, max(0.1, measured / expected))
            self._factor *= 1.0 + UPDATE * (ratio - 1.0)
            if self.trials is not None:
                self.trials.read(measured * reading / expected)


@compiled
def best_count(acceptance, offsets, expected, wanted, requests, step_ms, passes_ms, min_gain):
    """The number of passes with the highest goodput; 0: none.

    Args:
        acceptance: float32 [total], of the other source's drafts.
        offsets: int64 [requests + 1], where each of these begins.
        expected: float64 [requests, most], cumulative acceptance probability of the draft model's tokens.
        wanted: bool [requests, most], for whom so many passes, less one, are.
        requests: in the step, those without a draft included.
        step_ms: float64 [n + 1], milliseconds of a step with 0 to n draft tokens.
        passes_ms: float64 [most], milliseconds of one to `most` passes.
        min_gain: gain in goodput, as a share, below which nothing is verified.
    """
    plain = requests / step_ms[0]
    most, best, best_gain = expected.shape[1], 0, -np.inf
    joined = np.empty(acceptance.size + expected.size, np.float32)
    ends = np.zeros(offsets.size, np.int64)
    cost = step_ms.copy()
    for count in range(most + 1):
        if count > 0 and not wanted[:, count - 1].any():
            continue
        extra = passes_ms[count - 1] if count > 0 else 0.0
        for i in range(offsets.size - 1):
            end = ends[i]
            if count > 0 and wanted[i, count - 1]:
                for j in range(count):
                    joined[end] = expected[i, j]
                    end += 1
            else:
                for j in range(offsets[i], offsets[i + 1]):
                    joined[end] = acceptance[j]
                    end += 1
            ends[i + 1] = end
        tokens, milliseconds = requests + joined[: ends[-1]].sum(), step_ms[min(1, step_ms.size - 1)] + extra
        if count > 0 and tokens / milliseconds <= (1.0 + best_gain) * plain:
            continue  # even if all were verified for the cost of one
        cost[1:] = step_ms[1:] + extra
        _, gain, accepted = choose_lengths(joined[: ends[-1]], ends, requests, cost, min_gain)
        if accepted == 0.0:
            gain = 0.0
        if gain > best_gain:
            best, best_gain = count, gain
    return best


def may_pay(policy: Any, state, drafts, cost: PassCost, now: float | None = None) -> bool:
    """Whether passes are worth a plan, to be asked once in each step; False while they rest after a trial.

    Args:
        policy, state, drafts, cost: as of `plan_passes`.
        now: seconds, of any clock; None: of the process.
    """
    costs, trials = getattr(policy, "step_ms", None), cost.trials
    if costs is None or trials is None:
        return True
    trials.are_needed = trials.are_needed or len(drafts.acceptance) > 0
    if not trials.are_needed:
        return True
    now = time.perf_counter() if now is None else now
    return trials.step(state.running, state.context, float(costs(state)[0]), now)


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
    costs = getattr(policy, "step_ms", None)
    expected = expected[:, :most]
    if rule is None:
        ends = np.concatenate([[0.0], np.cumsum(drafts.acceptance, dtype=np.float64)])
        other = ends[drafts.offsets[1:]] - ends[drafts.offsets[:-1]]
        wanted = np.cumsum(expected, axis=1) > other[:, None]
    else:
        wanted = np.repeat(rule[:, None], most, axis=1)
    wanted &= expected[:, :1] > 0
    numbers, missed = wanted.sum(axis=0), missing @ wanted
    if costs is None:
        count = most if numbers[-1] else 0
    else:
        passes_ms = cost.planned(numbers, missed)
        count = best_count(
            drafts.acceptance, drafts.offsets, expected, wanted, state.running, costs(state), passes_ms,
            MIN_GAIN_OFF,
        )  # fmt: skip
    if count == 0:
        return nobody
    last = count - 1
    requests, read = int(numbers[last]), int(missed[last])
    milliseconds = cost.of_passes(count, requests, read)
    return Passes(count, wanted[:, last], milliseconds, milliseconds - cost.of_passes(count, requests, requests))
