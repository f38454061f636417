"""The goodput policy: verify the draft tokens that bring the most expected tokens per second.

A step of R requests and B draft tokens brings R tokens and the accepted drafts: with the likeliest B of all drafts,
goodput(B) = (R + sum of their acceptance probabilities) / T(R, R + B, context). The B with the highest goodput is
verified, so requests with good drafts get many and others none. vllm-ascend tunes one draft length per batch size by
the same quotient (examples/offline_DSD_k_tuner); here it is taken anew in every step, over single tokens.

Where data-parallel ranks wait for each other in every step, T is never less than what the fullest of the others takes:
drafts are free up to there, and no further.

T comes from a table and is corrected by what steps take (sam.switch.cost_correction).
"""

from __future__ import annotations

import numpy as np

from sam.jit import compiled
from sam.switch.cost_correction import Correction
from sam.switch.policy import Plan, StepState
from sam.switch.step_cost import StepCost, linear

BINS = 256  # of acceptance probability, within which tokens count as equal
CONTEXT_BUCKET = 256  # tokens; costs are looked up anew when the mean context has grown by so much
# What speculation must bring at least, as a share: below it, noise in the table decides.
LEAST_GAIN_ON, LEAST_GAIN_OFF = 0.01, 0.005
CERTAIN = 0.99  # no draft token is more likely than this
# The first steps teach, later ones one in so many milliseconds: a lesson takes a twentieth of a millisecond.
LEARN_ALL, LEARN_AFTER = 64, 50.0
LONGEST_COOL_DOWN = 64  # steps without drafting after drafts that were not worth verifying, or missed
LONGEST_HOLD = 15  # of them in which it is not asked, nor learns what a step takes
# Share of the drafts verified so far that still counts a step later, or, where a step's drafts are expected to bring
# less than a token, one such token later: unlikely ones must add up, too.
FORGET_MISSES = 0.9
FEWEST_EXPECTED, LARGEST_MISS = 4.0, 0.5  # accepted below this share of that many expected: the estimate is wrong
MISSED_COOL_DOWN = 16  # steps after that; twice as many each further time


@compiled
def choose_lengths(acceptance, offsets, requests, cost, bar):
    """The draft tokens that maximise expected tokens per millisecond.

    Args:
        acceptance: float32 [total], cumulative probabilities, falling within each draft.
        offsets: int64 [drafts + 1], where each begins.
        requests: in the step, each bringing one token without drafts.
        cost: float64 [most + 1], milliseconds until a step with so many draft tokens is through on all ranks.
        bar: gain, as a share, below which nothing is verified.

    Returns:
        int64 [drafts] tokens of each, the gain expected from them as a share, and its tokens.
    """
    count, total = np.zeros(BINS, np.int64), np.zeros(BINS, np.float64)
    for p in acceptance:
        place = min(BINS - 1, int(p * BINS))
        count[place] += 1
        total[place] += p
    most, drafts = cost.size - 1, 0
    nothing = requests / cost[0]
    best, best_drafts, brought, best_brought = nothing, 0, 0.0, 0.0
    for place in range(BINS - 1, -1, -1):
        each = total[place] / max(1, count[place])
        for _ in range(count[place]):
            if drafts == most:
                break
            drafts += 1
            brought += each
            goodput = (requests + brought) / cost[drafts]
            if goodput > best:
                best, best_drafts, best_brought = goodput, drafts, brought
    lengths = np.zeros(offsets.size - 1, np.int64)
    if best < (1.0 + bar) * nothing:
        return lengths, best / nothing - 1.0, 0.0
    left, place = best_drafts, BINS - 1
    while count[place] <= left and place > 0:
        left -= count[place]
        place -= 1
    for i in range(lengths.size):
        for j in range(offsets[i], offsets[i + 1]):
            mine = min(BINS - 1, int(acceptance[j] * BINS))
            if mine < place or (mine == place and left == 0):
                break
            left -= mine == place
            lengths[i] += 1
    return lengths, best / nothing - 1.0, best_brought


@compiled
def correct(table, fixed, token, speculating, wait):
    """The table with so much more for the step, each draft token, and a step with any; and the least slope of what
    follows from it, of which the latter is no part.

    No step is faster for more work, nor than a tenth of what the table says, nor than the `wait` for other ranks.
    """
    cost, slope = np.empty_like(table), np.inf
    for drafts in range(table.size):
        once = speculating if drafts > 0 else 0.0
        cost[drafts] = max(table[drafts] + fixed + token * drafts + once, 0.1 * table[drafts], wait)
        if drafts > 0:
            cost[drafts] = max(cost[drafts], cost[drafts - 1])
            slope = min(slope, max(0.0, cost[drafts] - cost[0] - max(0.0, speculating)) / drafts)
    return cost, slope


def warm_up() -> None:
    """Compile every kernel, so that no step waits for it."""
    policy, state = Goodput(1), StepState(1)
    policy.choose(state, np.array([0.5], np.float32), np.array([0, 1]))
    policy.observe(state, 1, 1, 1.0)


class Goodput:
    """Each step the drafts with the highest goodput, none where they would not pay.

    Args:
        num_speculative_tokens: longest draft.
        step_cost: what a step takes; without it a guess that the first observed steps replace.
        graph_sizes: tokens of the captured graphs: a step costs what the next larger one costs.
    """

    def __init__(
        self, num_speculative_tokens: int, step_cost: StepCost | None = None, graph_sizes: tuple[int, ...] = ()
    ):
        self.num_speculative_tokens = num_speculative_tokens
        self.has_table = step_cost is not None
        self.step_cost = step_cost or linear(1.0, 0.0, 1 / 64, source="a guess: 64 tokens double a step")
        self.graph_sizes = np.array(sorted(graph_sizes), dtype=np.int64)
        self.correction = Correction(self.step_cost, forward_only=not self.has_table)
        self.counters: dict[str, int] = {}
        self._on = False
        self._costs: dict[tuple[int, int], np.ndarray] = {}
        self._steps: dict[tuple[int, int, int], float] = {}
        self._cool_down = self._declined = self._missed = self._running = self._observed = 0
        self._expected = self._accepted = self._brought = self._unlearnt = 0.0
        self._corrected: tuple[tuple[int, int, int], np.ndarray, Plan] | None = None

    def use_table(self, step_cost: StepCost, forward_only: bool = False) -> None:
        """Replace the table, as when the engine has measured one, of forward passes or of whole steps."""
        self.has_table, self.step_cost = True, step_cost
        self.correction = Correction(step_cost, forward_only)
        self._costs.clear()
        self._steps.clear()
        self._corrected = None

    def plan(self, state: StepState) -> Plan:
        self._cool(state.steps - 1)  # nobody asked in these
        if state.running != self._running:
            self._running, self._cool_down = state.running, min(self._cool_down, 1)
        if self._cool_down > 0:
            self._cool(1)
            return Plan(0, hold=min(self._cool_down, LONGEST_HOLD))
        return self._cost(state)[1]

    def _cool(self, steps: int) -> None:
        self._cool_down = max(0, self._cool_down - steps)
        if steps:
            self._count("cool_down_steps", steps)

    def choose(self, state: StepState, acceptance: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        bar = LEAST_GAIN_OFF if self._on else LEAST_GAIN_ON
        lengths, _, self._brought = choose_lengths(acceptance, offsets, state.running, self._cost(state)[0], bar)
        self._on = self._brought > 0
        if self._on:
            self._declined = 0
        else:
            self._count("declined_steps")
            self._cool_down = min(LONGEST_COOL_DOWN, 1 << min(self._declined, 8)) - 1
            self._declined += 1
        return lengths

    def observe(self, state: StepState, drafted: int, accepted: int, milliseconds: float) -> None:
        if drafted:
            self._check_acceptance(accepted)
        self._observed += 1
        self._unlearnt += milliseconds
        if self._observed > LEARN_ALL and self._unlearnt < LEARN_AFTER:
            return
        if state.prefilling == 0 and state.rows_elsewhere <= state.running + drafted:
            expected = float(self._table(state)[min(drafted, state.running * self.num_speculative_tokens)])
            # Their rows may be of more requests than ours, or more of them drafts, whichever takes longer.
            if self._longest_elsewhere(state) > expected:
                return
            if self.correction.observe(state.running, drafted, expected, milliseconds):
                self._unlearnt, self._corrected = 0.0, None

    def _check_acceptance(self, accepted: int) -> None:
        """Pause where much less is accepted than was expected."""
        keep = FORGET_MISSES ** min(1.0, self._brought)
        self._expected = keep * self._expected + self._brought
        self._accepted = keep * self._accepted + accepted
        if self._expected <= FEWEST_EXPECTED:
            return
        if self._accepted >= LARGEST_MISS * self._expected:
            self._missed = 0
            return
        self._cool_down = min(LONGEST_COOL_DOWN, MISSED_COOL_DOWN << self._missed)
        self._missed = min(self._missed + 1, 8)
        self._expected = self._accepted = 0.0

    def _count(self, name: str, steps: int = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + steps

    def _table(self, state: StepState) -> np.ndarray:
        """float64 [running * k + 1]: milliseconds by draft tokens, as the table says."""
        key = (state.running, int(state.context) // CONTEXT_BUCKET)
        if key not in self._costs:
            if len(self._costs) > 4096:
                self._costs.clear()
            rows = state.running + np.arange(state.running * self.num_speculative_tokens + 1)
            self._costs[key] = self._look_up(state.running, rows, key[1])
        return self._costs[key]

    def _step(self, requests: int, rows: int, state: StepState) -> float:
        """Milliseconds of a step with so many requests and rows in the context of `state`, as the table says."""
        key = (requests, rows, int(state.context) // CONTEXT_BUCKET)
        if key not in self._steps:
            if len(self._steps) > 4096:
                self._steps.clear()
            self._steps[key] = float(self._look_up(requests, np.array([rows]), key[2])[0])
        return self._steps[key]

    def _look_up(self, requests: int, rows: np.ndarray, bucket: int) -> np.ndarray:
        """float64 [n]: milliseconds by rows (int64 [n]), of a context in the middle of its bucket."""
        if len(self.graph_sizes):
            at = np.searchsorted(self.graph_sizes, rows)
            captured = at < len(self.graph_sizes)
            rows = np.where(captured, self.graph_sizes[np.minimum(at, len(self.graph_sizes) - 1)], rows)
        return self.step_cost.of(requests, rows, (bucket + 0.5) * CONTEXT_BUCKET)

    def _fewest_elsewhere(self, state: StepState) -> int:
        """Requests that the rows of the fullest other rank are of at least: with as many drafts as each may have."""
        return -(-state.rows_elsewhere // (self.num_speculative_tokens + 1))

    def _wait(self, state: StepState) -> float:
        """Milliseconds that the fullest other rank takes at least, with this rank's mean context; 0 without one."""
        if state.rows_elsewhere == 0:
            return 0.0
        # Its drafts are left out. They can be cheaper than requests or dearer, and ranks that took each other's drafts
        # for something to wait for would go on drafting because the others do. Requests that the table does not reach
        # are left out too: they are its extrapolation, and may be tokens of a prompt.
        requests = min(self._fewest_elsewhere(state), int(self.step_cost.requests[-1]))
        table = self._step(requests, requests, state)
        return max(table + self.correction.of(requests, 0), 0.1 * table)

    def _longest_elsewhere(self, state: StepState) -> float:
        """Milliseconds that rows of the fullest other rank take: all requests, or as many drafts as there can be."""
        rows = state.rows_elsewhere
        if rows == 0:
            return 0.0
        return max(self._step(requests, rows, state) for requests in (rows, self._fewest_elsewhere(state)))

    def _cost(self, state: StepState) -> tuple[np.ndarray, Plan]:
        """As `_table`, but corrected and at least `_wait`, and the plan that follows; kept until it learns more."""
        key = (state.running, int(state.context) // CONTEXT_BUCKET, state.rows_elsewhere)
        if self._corrected is None or self._corrected[0] != key:
            _, _, token, speculating = self.correction.coefficients.tolist()
            fixed = self.correction.of(state.running, 0)
            cost, slope = correct(self._table(state), fixed, token, speculating, self._wait(state))
            floor = state.running * slope / cost[0]
            plan = Plan(self.num_speculative_tokens, floor) if floor < CERTAIN else Plan(0)
            self._corrected = key, cost, plan
        return self._corrected[1:]
