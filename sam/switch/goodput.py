"""The goodput policy: verify the draft tokens that bring the most expected tokens per second.

A step of R requests and B draft tokens brings R tokens and the accepted drafts: with the B likeliest of all drafts,
goodput(B) = (R + sum of their probabilities of being accepted) / T(R, R + B, context). The B with the highest goodput
is verified, so requests with good drafts get many and others none.

SmartSpec (Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput", arXiv
2406.14066) introduced goodput as the target. It picks one draft length for all requests of a batch, expects acceptance
from a moving average of the acceptance rate, and takes T from a linear model that is fitted offline. Here the choice
is over single tokens, each with a probability of its own from the drafter; T is a table whose error is learnt from the
steps themselves (sam.switch.expected_cost), also from steps that explore what was not seen for long
(sam.switch.exploration); and drafting pauses where it does not pay.
"""

from functools import partial

import numpy as np

from sam.switch.draft_tokens import add_rows, choose_lengths
from sam.switch.expected_cost import ExpectedCost
from sam.switch.exploration import CostExploration
from sam.switch.policy import Plan, Policy, StepState
from sam.switch.step_cost import StepCost, linear

# Share by which speculation must raise goodput: below it, noise in the table decides.
MIN_GAIN_OFF, MIN_GAIN_ON = 0.01, 0.005
MAX_ACCEPTANCE = 0.99  # no draft token is more likely than this
MAX_PAUSE_STEPS = 64
MAX_VALID_FOR_STEPS = 15  # of a pause, in which the policy is not asked and learns nothing
# Weight that a step's expected and accepted tokens keep in the next step or, where fewer than one token is expected per
# step, after as many steps as expect one: unlikely drafts must add up, too.
ACCEPTANCE_DECAY = 0.9
# Of at least MIN_EXPECTED tokens less than this share accepted: the drafter's probabilities are wrong.
MIN_EXPECTED, MIN_ACCEPTED_SHARE = 4.0, 0.5
DECLINED_PAUSE_STEPS, REJECTED_PAUSE_STEPS = 1, 4  # the first pause, which counts the step itself where it was declined


def warm_up() -> None:
    """Compile every kernel, so that no engine step waits for it."""
    policy, state = Goodput(1), StepState(1)
    policy.choose(state, np.array([0.5], np.float32), np.array([0, 1]))
    policy.choose_paths(state, 1, np.array([0.5], np.float32), np.array([0, 1]), np.array([1]))
    policy.observe(state, 1, 1, 1.0)


class Pause:
    """Steps without drafting after drafts that were not worth verifying, or of which too few were accepted: twice as
    many each time, until drafts bring again what is expected of them.

    Attributes:
        steps: of the pause that are left.
    """

    def __init__(self):
        self.steps = self._failures = 0
        self._expected = self._accepted = 0.0  # decaying sums over the steps with drafts

    def declined(self) -> None:
        """Begin after a step whose drafts were not worth verifying; that step was the first."""
        self._begin(DECLINED_PAUSE_STEPS)
        self.steps -= 1

    def compare(self, expected: float, accepted: int) -> None:
        """Begin if far fewer draft tokens are accepted than expected."""
        keep = ACCEPTANCE_DECAY ** min(1.0, expected)
        self._expected, self._accepted = keep * self._expected + expected, keep * self._accepted + accepted
        if self._expected <= MIN_EXPECTED:
            return
        if self._accepted >= MIN_ACCEPTED_SHARE * self._expected:
            self._failures = 0
            return
        self._begin(REJECTED_PAUSE_STEPS)
        self._expected = self._accepted = 0.0

    def _begin(self, steps: int) -> None:
        self.steps = min(MAX_PAUSE_STEPS, steps << self._failures)
        self._failures = min(self._failures + 1, 8)


class Goodput(Policy):
    """Verify in each step the draft tokens with the highest goodput, and none where speculation would not pay.

    Args:
        num_speculative_tokens: draft tokens of a request at most.
        step_cost: milliseconds of a step; None starts from a guess that the first observed steps replace.
        graph_sizes: tokens of the captured graphs: a step takes as long as the next larger graph.
        uniform: whether a step with any draft tokens verifies `num_speculative_tokens` of every request, and so takes
            as long whichever are chosen.
        paths: of a request at most, each of as many draft tokens.

    Attributes:
        cost: what steps are thought to take.
        has_table: whether the step costs were measured.
        counters: declined_steps (drafted, nothing worth verifying), of which exploring_steps (verified all the same),
            and paused_steps (not drafted after that).
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        step_cost: StepCost | None = None,
        graph_sizes: tuple[int, ...] = (),
        uniform: bool = False,
        paths: int = 1,
    ):
        super().__init__()
        self.num_speculative_tokens, self.uniform = num_speculative_tokens, uniform
        rest = {"graph_sizes": graph_sizes, "uniform": uniform, "paths": paths}
        self._cost_of = partial(ExpectedCost, num_speculative_tokens=num_speculative_tokens, **rest)
        guess = linear(1.0, 0.0, 1 / 64, source="a guess: 64 tokens double a step")
        self.use_table(step_cost or guess, forward_only=step_cost is None)
        self.has_table = step_cost is not None
        self._pause, self._exploration = Pause(), CostExploration()
        self._is_on, self._running = False, 0
        self._expected = 0.0  # of the drafts last chosen, the tokens expected to be accepted

    def use_table(self, step_cost: StepCost, forward_only: bool = False) -> None:
        """Replace the table, for example when the engine has measured one.

        Args:
            forward_only: whether it holds forward passes instead of whole steps.
        """
        self.has_table, self.cost = True, self._cost_of(step_cost, forward_only=forward_only)

    def step_ms(self, state: StepState) -> np.ndarray:
        """float64 [n + 1]: milliseconds that a step with 0 to n draft tokens is thought to take."""
        return self.cost.of(state)[0]

    def plan(self, state: StepState) -> Plan:
        """Ask for drafts unless there is a pause, no draft token can pay, or a step without is to be observed."""
        self._spend_pause(state.steps_since_plan - 1)
        self._exploration.count_plain(state.steps_since_plan)
        if state.running != self._running:
            self._running, self._pause.steps = state.running, min(self._pause.steps, 1)
        if self._exploration.wants_plain_step():
            return Plan(0)
        if self._pause.steps > 0:
            self._spend_pause(1)
            return Plan(0, valid_for_steps=min(self._pause.steps, MAX_VALID_FOR_STEPS))
        floor = self._exploration.min_acceptance(self.cost.of(state)[1])
        return Plan(self.num_speculative_tokens, floor) if floor < MAX_ACCEPTANCE else Plan(0)

    def _spend_pause(self, steps: int) -> None:
        self._pause.steps = max(0, self._pause.steps - steps)
        if steps:
            self.count("paused_steps", steps)

    def choose(self, state: StepState, acceptance: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Choose the draft tokens with the highest goodput; if that is without any, pause, or explore."""
        min_gain = MIN_GAIN_ON if self._is_on else MIN_GAIN_OFF
        drafts = acceptance, offsets, state.running
        lengths, _, self._expected = choose_lengths(*drafts, self.step_ms(state), min_gain)
        self._is_on = self._expected > 0
        if self._is_on:
            self._exploration.count_drafted()
            return lengths
        self.count("declined_steps")
        self._pause.declined()
        lengths, self._expected = self._exploration.choose(*drafts, self.step_ms(state), min_gain)
        if self._exploration.is_exploring:
            self.count("exploring_steps")
        return lengths

    def choose_paths(
        self, state: StepState, drafted: int, acceptance: np.ndarray, offsets: np.ndarray, overhead: np.ndarray
    ) -> np.ndarray:
        """Choose the further paths that raise goodput."""
        whole = self.num_speculative_tokens + 1 if self.uniform else 0
        step = state.running, drafted, self._expected, self.step_ms(state)
        chosen, self._expected = add_rows(
            acceptance, offsets, overhead, whole, *step, MIN_GAIN_ON / max(1, state.running)
        )
        return chosen

    def observe(self, state: StepState, drafted: int, accepted: int, milliseconds: float) -> None:
        """Compare acceptance with what was expected, and learn what the step took beyond the table."""
        if drafted:
            self._pause.compare(self._expected, accepted)
        self.cost.observe(state, drafted, milliseconds, is_wanted=self._exploration.wanted(drafted))
