"""What an engine step is thought to take: the table of step costs, corrected by measured steps, for all ranks."""

from functools import lru_cache

import numpy as np

from sam.jit import compiled
from sam.switch.cost_correction import Correction
from sam.switch.policy import StepState
from sam.switch.step_cost import StepCost

CONTEXT_BUCKET = 256  # tokens by which the mean context may grow before costs are looked up again
KEPT_LOOK_UPS = 4096
# All of the first steps are learnt from, later one every so many milliseconds: an update takes 0.1 ms.
ALWAYS_LEARN_STEPS, LEARN_INTERVAL_MS = 64, 50.0


@compiled
def correct(table, fixed, per_draft_token, speculating, wait_ms):
    """Add the learnt correction to a table of costs.

    No step is faster than one with fewer draft tokens, than a tenth of the table's value, or than `wait_ms`.

    Args:
        table: float64 [n + 1], milliseconds of a step with 0 to n draft tokens.
        fixed: milliseconds beyond the table, of any step with these requests.
        per_draft_token: milliseconds beyond the table, of each draft token.
        speculating: milliseconds beyond the table, of a step with any.
        wait_ms: milliseconds that the other ranks take.

    Returns:
        float64 [n + 1], corrected milliseconds; and the least that a draft token adds, without the term `speculating`.
    """
    cost, slope = np.empty_like(table), np.inf
    cost[0] = max(table[0] + fixed, 0.1 * table[0], wait_ms)
    for drafted in range(1, table.size):
        corrected = table[drafted] + fixed + per_draft_token * drafted + speculating
        cost[drafted] = max(corrected, 0.1 * table[drafted], cost[drafted - 1])
        slope = min(slope, max(0.0, cost[drafted] - cost[0] - speculating) / drafted)
    return cost, slope


def _bucket(state: StepState) -> int:
    return int(state.context) // CONTEXT_BUCKET


class ExpectedCost:
    """Milliseconds of steps, by the requests, draft tokens and context that a StepState names.

    Under data parallelism all ranks wait for the fullest: a step never takes less than that one's, so that drafts are
    free up to there.

    Args:
        step_cost: the table.
        num_speculative_tokens, graph_sizes, uniform, paths: as of sam.switch.goodput.Goodput.
        forward_only: whether the table holds forward passes instead of whole steps.
    """

    def __init__(
        self,
        step_cost: StepCost,
        num_speculative_tokens: int,
        graph_sizes: tuple[int, ...] = (),
        uniform: bool = False,
        paths: int = 1,
        forward_only: bool = False,
    ):
        self.step_cost, self.correction = step_cost, Correction(step_cost, forward_only)
        self._row = num_speculative_tokens + 1  # tokens of a request with a whole draft
        self._most_draft_tokens = paths * self._row - 1  # of a request
        self._graph_sizes, self._uniform = np.array(sorted(graph_sizes), dtype=np.int64), uniform
        self._table = lru_cache(KEPT_LOOK_UPS)(self._read_table)
        self._observed_steps, self._ms_since_update = 0, 0.0
        self._corrected: tuple[tuple[int, int, int], np.ndarray, float] | None = None

    def of(self, state: StepState) -> tuple[np.ndarray, float]:
        """float64 [n + 1]: milliseconds of a step with 0 to n draft tokens; and the acceptance below which no draft
        token pays. Kept until more is learnt."""
        key = (state.running, _bucket(state), state.max_num_tokens_other_dp_ranks)
        if self._corrected is None or self._corrected[0] != key:
            terms, fixed = self.correction.terms, self.correction.extra_ms(state.running, 0)
            table, wait_ms = self._table(*key[:2]), self._wait_ms(state)
            cost, slope = correct(table, fixed, terms.per_draft_token, terms.speculating, wait_ms)
            self._corrected = key, cost, state.running * slope / cost[0]
        return self._corrected[1:]

    def observe(self, state: StepState, drafted: int, milliseconds: float, is_wanted: bool) -> None:
        """Learn from a step that no other rank can have held up, if it is `is_wanted` or the last one was long ago."""
        self._observed_steps += 1
        self._ms_since_update += milliseconds
        is_due = self._observed_steps <= ALWAYS_LEARN_STEPS or self._ms_since_update >= LEARN_INTERVAL_MS
        num_tokens_other = state.max_num_tokens_other_dp_ranks
        if state.prefilling or num_tokens_other > state.running + drafted or not (is_due or is_wanted):
            return
        table_ms = float(
            self._table(state.running, _bucket(state))[min(drafted, state.running * self._most_draft_tokens)]
        )
        # Another rank's tokens may be of more requests than this one's, or be drafts to a larger part.
        if num_tokens_other and self._max_ms_other_ranks(state) > table_ms:
            return
        if self.correction.observe(state.running, drafted, table_ms, milliseconds):
            self._ms_since_update, self._corrected = 0.0, None

    def _read_table(self, requests: int, bucket: int) -> np.ndarray:
        """float64 [n + 1]: the table's milliseconds by draft tokens, to the most that there can be."""
        num_tokens = requests + np.arange(requests * self._most_draft_tokens + 1)
        if self._uniform:
            num_tokens[1:] = np.maximum(num_tokens[1:], requests * self._row)
        return self._look_up(requests, num_tokens, bucket)

    def _look_up(self, requests: int, num_tokens: np.ndarray, bucket: int) -> np.ndarray:
        """float64 [n]: milliseconds by tokens (int64 [n]), for a context in the middle of its bucket."""
        if len(self._graph_sizes):
            at = np.searchsorted(self._graph_sizes, num_tokens)
            captured = at < len(self._graph_sizes)
            num_tokens = np.where(captured, self._graph_sizes[np.minimum(at, len(self._graph_sizes) - 1)], num_tokens)
        return self.step_cost.step_ms(requests, num_tokens, (bucket + 0.5) * CONTEXT_BUCKET)

    def _min_requests_other_ranks(self, state: StepState) -> int:
        """Requests that the fullest other rank has at least, if each has as many drafts as it may."""
        return -(-state.max_num_tokens_other_dp_ranks // self._row)

    def _wait_ms(self, state: StepState) -> float:
        """Milliseconds that the fullest other rank takes at least, with this rank's mean context; 0 without one."""
        if state.max_num_tokens_other_dp_ranks == 0:
            return 0.0
        # Its drafts are left out. They can be cheaper than requests or dearer, and ranks that took each other's drafts
        # for something to wait for would go on drafting because the others do. Requests that the table does not reach
        # are left out too: they are its extrapolation, and may be tokens of a prompt.
        requests = min(self._min_requests_other_ranks(state), int(self.step_cost.requests[-1]))
        table_ms = float(self._table(requests, _bucket(state))[0])
        return max(table_ms + self.correction.extra_ms(requests, 0), 0.1 * table_ms)

    def _max_ms_other_ranks(self, state: StepState) -> float:
        """Milliseconds that the fullest other rank takes at most: with as many requests or as many drafts as can be."""
        num_tokens = state.max_num_tokens_other_dp_ranks
        counts = (num_tokens, self._min_requests_other_ranks(state))
        return max(self._look_up(count, np.array([num_tokens]), _bucket(state))[0] for count in counts)
