"""The goodput policy: verify the draft tokens that bring the most expected tokens per second.

A step of R requests and B draft tokens brings R tokens and the accepted drafts: with the B likeliest of all drafts,
goodput(B) = (R + sum of their probabilities of being accepted) / T(R, R + B, context). The B with the highest goodput
is verified, so requests with good drafts get many and others none.

SmartSpec (Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput", arXiv
2406.14066) introduced goodput as the target. It picks one draft length for all requests of a batch, expects acceptance
from a moving average of the acceptance rate, and takes T from a linear model that is fitted offline. Here the choice
is over single tokens, each with a probability of its own from the drafter; T is a table whose error is learnt from the
steps themselves (sam.switch.cost_correction), also from steps that explore where no draft seems to pay
(sam.switch.cost_exploration);
drafting pauses where it does not pay; and under data parallelism T is never less than the time of the fullest other
rank, which all ranks wait for: drafts are free up to there.
"""

from functools import lru_cache

import numpy as np

from sam.jit import compiled
from sam.switch.cost_correction import Correction
from sam.switch.cost_exploration import CostExploration
from sam.switch.draft_tokens import add_rows, choose_lengths
from sam.switch.policy import Plan, StepState
from sam.switch.step_cost import StepCost, linear

CONTEXT_BUCKET = 256  # tokens by which the mean context may grow before costs are looked up again
KEPT_LOOK_UPS = 4096
# Share by which speculation must raise goodput: below it, noise in the table decides.
MIN_GAIN_OFF, MIN_GAIN_ON = 0.01, 0.005
MAX_ACCEPTANCE = 0.99  # no draft token is more likely than this
# All of the first steps are learnt from, later one every so many milliseconds: an update takes 0.1 ms.
ALWAYS_LEARN_STEPS, LEARN_INTERVAL_MS = 64, 50.0
MAX_COOL_DOWN_STEPS = 64  # steps without drafting after drafts that were not worth verifying, or were rejected
MAX_VALID_FOR_STEPS = 15  # of them in which the policy is not asked and learns nothing
# Weight that a step's expected and accepted tokens keep in the next step or, where fewer than one token is expected per
# step, after as many steps as expect one: unlikely drafts must add up, too.
ACCEPTANCE_DECAY = 0.9
# Of at least MIN_EXPECTED tokens less than this share accepted: the drafter's probabilities are wrong.
MIN_EXPECTED, MIN_ACCEPTED_SHARE = 4.0, 0.5
# Where every step has drafts nothing tells what one without would take: asynchronously scheduled it waits for nobody.
# After so many steps with drafts, fewer at the start, some without are observed.
FIRST_DRAFTED_STEPS, DRAFTED_STEPS, PLAIN_STEPS, MOST_PLAIN_STEPS = 8, 64, 2, 6
REJECTED_COOL_DOWN_STEPS = 4  # steps without drafting after that; twice as many each further time


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
    for drafted in range(table.size):
        once = speculating if drafted > 0 else 0.0
        corrected = table[drafted] + fixed + per_draft_token * drafted + once
        cost[drafted] = max(corrected, 0.1 * table[drafted], wait_ms)
        if drafted > 0:
            cost[drafted] = max(cost[drafted], cost[drafted - 1])
            slope = min(slope, max(0.0, cost[drafted] - cost[0] - max(0.0, speculating)) / drafted)
    return cost, slope


def _bucket(state: StepState) -> int:
    return int(state.context) // CONTEXT_BUCKET


def warm_up() -> None:
    """Compile every kernel, so that no engine step waits for it."""
    policy, state = Goodput(1), StepState(1)
    policy.choose(state, np.array([0.5], np.float32), np.array([0, 1]))
    policy.choose_paths(state, 1, np.array([0.5], np.float32), np.array([0, 1]), np.array([1]))
    policy.observe(state, 1, 1, 1.0)


class Goodput:
    """Verify in each step the draft tokens with the highest goodput, and none where speculation would not pay.

    Args:
        num_speculative_tokens: draft tokens of a request at most.
        step_cost: milliseconds of a step; None starts from a guess that the first observed steps replace.
        graph_sizes: tokens of the captured graphs: a step takes as long as the next larger graph.
        uniform: whether a step with any draft tokens verifies `num_speculative_tokens` of every request, and so takes
            as long whichever are chosen.
        paths: of a request at most, each of as many draft tokens.

    Attributes:
        has_table: whether the step costs were measured.
        counters: declined_steps (drafted, nothing worth verifying), of which price_trials (verified all the same), and
            cool_down_steps (not drafted after that).
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        step_cost: StepCost | None = None,
        graph_sizes: tuple[int, ...] = (),
        uniform: bool = False,
        paths: int = 1,
    ):
        self.num_speculative_tokens, self.uniform = num_speculative_tokens, uniform
        self._most_draft_tokens = num_speculative_tokens + (paths - 1) * (num_speculative_tokens + 1)  # of a request
        self.has_table = step_cost is not None
        self.step_cost = step_cost or linear(1.0, 0.0, 1 / 64, source="a guess: 64 tokens double a step")
        self.graph_sizes = np.array(sorted(graph_sizes), dtype=np.int64)
        self.correction = Correction(self.step_cost, forward_only=not self.has_table)
        self.counters: dict[str, int] = {}
        self._on = False
        self._table, self._step_ms = (lru_cache(KEPT_LOOK_UPS)(one) for one in (self._read_table, self._read_step))
        self._running = self._observed_steps = self._cool_down = self._declined = self._rejected = 0
        self._chosen_expected = 0.0  # of the drafts last chosen, the tokens expected to be accepted
        self._expected = self._accepted = 0.0  # decaying sums over the steps with drafts
        self._ms_since_update = 0.0  # milliseconds of the steps since one was learnt from
        self._exploration, self._is_exploring = CostExploration(), False
        # Observed since the last plain ones.
        self._drafted_steps, self._plain_steps = DRAFTED_STEPS - FIRST_DRAFTED_STEPS, 0
        self._corrected: tuple[tuple[int, int, int], np.ndarray, float] | None = None

    def use_table(self, step_cost: StepCost, forward_only: bool = False) -> None:
        """Replace the table, for example when the engine has measured one.

        Args:
            forward_only: whether it holds forward passes instead of whole steps.
        """
        self.has_table, self.step_cost = True, step_cost
        self.correction = Correction(step_cost, forward_only)
        self._table.cache_clear()
        self._step_ms.cache_clear()
        self._corrected = None

    def plan(self, state: StepState) -> Plan:
        """Ask for drafts unless speculation cools down or no draft token can pay."""
        self._cool(state.steps_since_plan - 1)
        self._exploration.count_plain(state.steps_since_plan)
        if state.running != self._running:
            self._running, self._cool_down = state.running, min(self._cool_down, 1)
        if self._drafted_steps >= DRAFTED_STEPS:
            self._drafted_steps += 1
            if self._drafted_steps < DRAFTED_STEPS + MOST_PLAIN_STEPS:
                return Plan(0)
            self._drafted_steps = 0
        if self._cool_down > 0:
            self._cool(1)
            return Plan(0, valid_for_steps=min(self._cool_down, MAX_VALID_FOR_STEPS))
        floor = self._exploration.min_acceptance(self._cost(state)[1])
        return Plan(self.num_speculative_tokens, floor) if floor < MAX_ACCEPTANCE else Plan(0)

    def _cool(self, steps: int) -> None:
        self._cool_down = max(0, self._cool_down - steps)
        if steps:
            self._count("cool_down_steps", steps)

    def choose(self, state: StepState, acceptance: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Choose the draft tokens with the highest goodput; if that is without any, cool down, or explore."""
        min_gain = MIN_GAIN_ON if self._on else MIN_GAIN_OFF
        cost, _ = self._cost(state)
        lengths, _, self._chosen_expected = choose_lengths(acceptance, offsets, state.running, cost, min_gain)
        self._on, self._is_exploring = self._chosen_expected > 0, False
        if self._on:
            self._declined = 0
            self._exploration.reset()
            return lengths
        self._count("declined_steps")
        self._cool_down = min(MAX_COOL_DOWN_STEPS, 1 << min(self._declined, 8)) - 1
        self._declined += 1
        lengths, self._chosen_expected = self._exploration.choose(acceptance, offsets, state.running, cost, min_gain)
        self._is_exploring = bool(lengths.any())
        if self._is_exploring:
            self._count("price_trials")
        return lengths

    def choose_paths(
        self, state: StepState, drafted: int, acceptance: np.ndarray, offsets: np.ndarray, overhead: np.ndarray
    ) -> np.ndarray:
        """Choose the further paths that raise goodput."""
        whole = self.num_speculative_tokens + 1 if self.uniform else 0
        step = state.running, drafted, self._chosen_expected, self._cost(state)[0]
        chosen, self._chosen_expected = add_rows(
            acceptance, offsets, overhead, whole, *step, MIN_GAIN_ON / max(1, state.running)
        )
        return chosen

    def step_ms(self, state: StepState) -> np.ndarray:
        """float64 [n + 1]: milliseconds that a step with 0 to n draft tokens is thought to take."""
        return self._cost(state)[0]

    def observe(self, state: StepState, drafted: int, accepted: int, milliseconds: float) -> None:
        """Compare acceptance with what was expected, and learn what the step took beyond the table."""
        if drafted:
            self._check_acceptance(accepted)
        self._observed_steps += 1
        self._ms_since_update += milliseconds
        is_due = self._observed_steps <= ALWAYS_LEARN_STEPS or self._ms_since_update >= LEARN_INTERVAL_MS
        is_due |= self._count_plain_steps(drafted)
        if not is_due and not (self._is_exploring and drafted):
            return
        if state.prefilling == 0 and state.max_num_tokens_other_dp_ranks <= state.running + drafted:
            table_ms = float(
                self._table(state.running, _bucket(state))[min(drafted, state.running * self._most_draft_tokens)]
            )
            # Another rank's tokens may be of more requests than this one's, or be drafts to a larger part.
            if self._max_ms_other_ranks(state) > table_ms:
                return
            if self.correction.observe(state.running, drafted, table_ms, milliseconds):
                self._ms_since_update, self._corrected = 0.0, None

    def _count_plain_steps(self, drafted: int) -> bool:
        """Count steps without drafts, which alone tell what drafting costs; whether this one was asked for."""
        if drafted:
            self._drafted_steps, self._plain_steps = min(self._drafted_steps + 1, DRAFTED_STEPS), 0
            return False
        was_asked_for, self._plain_steps = self._drafted_steps >= DRAFTED_STEPS, self._plain_steps + 1
        if self._plain_steps >= PLAIN_STEPS:
            self._drafted_steps = 0
        return was_asked_for

    def _check_acceptance(self, accepted: int) -> None:
        """Cool down if far fewer draft tokens are accepted than expected."""
        keep = ACCEPTANCE_DECAY ** min(1.0, self._chosen_expected)
        self._expected = keep * self._expected + self._chosen_expected
        self._accepted = keep * self._accepted + accepted
        if self._expected <= MIN_EXPECTED:
            return
        if self._accepted >= MIN_ACCEPTED_SHARE * self._expected:
            self._rejected = 0
            return
        self._cool_down = min(MAX_COOL_DOWN_STEPS, REJECTED_COOL_DOWN_STEPS << self._rejected)
        self._rejected = min(self._rejected + 1, 8)
        self._expected = self._accepted = 0.0

    def _count(self, name: str, steps: int = 1) -> None:
        self.counters[name] = self.counters.get(name, 0) + steps

    def _read_table(self, requests: int, bucket: int) -> np.ndarray:
        """float64 [n + 1]: the table's milliseconds by draft tokens, to the most that there can be."""
        num_tokens = requests + np.arange(requests * self._most_draft_tokens + 1)
        if self.uniform:
            num_tokens[1:] = np.maximum(num_tokens[1:], requests * (self.num_speculative_tokens + 1))
        return self._look_up(requests, num_tokens, bucket)

    def _read_step(self, requests: int, num_tokens: int, bucket: int) -> float:
        """The table's milliseconds of a step with `requests` requests and `num_tokens` tokens."""
        return float(self._look_up(requests, np.array([num_tokens]), bucket)[0])

    def _look_up(self, requests: int, num_tokens: np.ndarray, bucket: int) -> np.ndarray:
        """float64 [n]: milliseconds by tokens (int64 [n]), for a context in the middle of its bucket."""
        if len(self.graph_sizes):
            at = np.searchsorted(self.graph_sizes, num_tokens)
            captured = at < len(self.graph_sizes)
            num_tokens = np.where(captured, self.graph_sizes[np.minimum(at, len(self.graph_sizes) - 1)], num_tokens)
        return self.step_cost.step_ms(requests, num_tokens, (bucket + 0.5) * CONTEXT_BUCKET)

    def _min_requests_other_ranks(self, state: StepState) -> int:
        """Requests that the fullest other rank has at least, if each has as many drafts as it may."""
        return -(-state.max_num_tokens_other_dp_ranks // (self.num_speculative_tokens + 1))

    def _wait_ms(self, state: StepState) -> float:
        """Milliseconds that the fullest other rank takes at least, with this rank's mean context; 0 without one."""
        if state.max_num_tokens_other_dp_ranks == 0:
            return 0.0
        # Its drafts are left out. They can be cheaper than requests or dearer, and ranks that took each other's drafts
        # for something to wait for would go on drafting because the others do. Requests that the table does not reach
        # are left out too: they are its extrapolation, and may be tokens of a prompt.
        requests = min(self._min_requests_other_ranks(state), int(self.step_cost.requests[-1]))
        table_ms = self._step_ms(requests, requests, _bucket(state))
        return max(table_ms + self.correction.extra_ms(requests, 0), 0.1 * table_ms)

    def _max_ms_other_ranks(self, state: StepState) -> float:
        """Milliseconds that the fullest other rank takes at most: with as many requests or as many drafts as can be."""
        num_tokens = state.max_num_tokens_other_dp_ranks
        if num_tokens == 0:
            return 0.0
        counts = (num_tokens, self._min_requests_other_ranks(state))
        return max(self._step_ms(requests, num_tokens, _bucket(state)) for requests in counts)

    def _cost(self, state: StepState) -> tuple[np.ndarray, float]:
        """`_table`, corrected and at least `_wait_ms`, and the acceptance below which no draft token pays; kept until
        more is learnt."""
        key = (state.running, _bucket(state), state.max_num_tokens_other_dp_ranks)
        if self._corrected is None or self._corrected[0] != key:
            terms, fixed = self.correction.terms, self.correction.extra_ms(state.running, 0)
            table, wait_ms = self._table(*key[:2]), self._wait_ms(state)
            cost, slope = correct(table, fixed, terms.per_draft_token, terms.speculating, wait_ms)
            self._corrected = key, cost, state.running * slope / cost[0]
        return self._corrected[1:]
