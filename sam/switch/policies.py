"""When an engine step speculates, and how many draft tokens it verifies: policies, which go by the arguments of calls
alone, and the switch, which asks one for the next step.

Goodput: a step of R requests that verifies the B likeliest of all draft tokens brings R tokens and those accepted, so
goodput(B) = (R + sum of their probabilities of being accepted) / T(R, R + B, context). The best B is verified.
SmartSpec (Liu et al., arXiv 2406.14066) introduced goodput as the target, with one draft length for all requests and a
linear T. Here T is a table whose error is learnt from the steps (sam.switch.step_cost), and drafting pauses where it
does not pay.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from sam.drafting.texts import Drafts
from sam.jit import compiled
from sam.switch.step_cost import ExpectedCost, StepCost, StepState, linear

NO_THRESHOLD = 1 << 30
# Share by which speculation must raise goodput, to begin and to go on: below it, noise in the table decides.
MIN_GAIN_OFF = 0.01
MIN_GAIN_ON = 0.005
MAX_ACCEPTANCE = 0.99  # no draft token is more likely than this
REJECTED_PAUSE_STEPS = 4
MAX_PAUSE_STEPS = 64
MAX_VALID_FOR_STEPS = 15  # of a pause, in which the policy is not asked and learns nothing
# Weight that a step's expected and accepted tokens keep in the next step or, where fewer than one token is expected per
# step, after as many steps as expect one: unlikely drafts must add up, too.
ACCEPTANCE_DECAY = 0.9
# Of at least MIN_EXPECTED tokens less than this share accepted: the drafter's probabilities are wrong.
MIN_EXPECTED = 4.0
MIN_ACCEPTED_SHARE = 0.5
COST_SHARE = 1 / 8  # of the cost thought, at which a draft token is worth exploring: a guess at how wrong tables are
LOSS_SHARE = 1 / 256  # of the time without drafts that exploring adds, if the cost is as thought
MAX_LOSS = 4.0  # steps without drafts: an exploring step that would add more verifies fewer tokens
# After so many steps with drafts, fewer at the start, some without are observed.
FIRST_DRAFTED_STEPS = 8
DRAFTED_STEPS = 96
PLAIN_STEPS = 3


@dataclass(frozen=True)
class Plan:
    """The drafts that a policy asks for in a step.

    Attributes:
        budget: int, draft tokens per request; 0 switches speculation off.
        min_acceptance: float in [0, 1], probability of being accepted below which a draft token cannot pay.
        valid_for_steps: int, further steps in which the plan stays the same while `running` stays the same: until then
            the policy need not be asked.
    """

    budget: int
    min_acceptance: float = 0.0
    valid_for_steps: int = 0


class Policy:
    """Decides in every engine step how many draft tokens are verified: here all that `plan` asks for."""

    def __init__(self):
        self.counters: dict[str, int] = {}  # which the metrics report

    def plan(self, state: StepState) -> Plan:
        """Say before drafting which drafts the step can use."""
        raise NotImplementedError

    def choose(self, state: StepState, acceptance: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Say after drafting how many tokens of each draft to verify; called only if the plan has a budget.

        Args:
            acceptance: float32 [total], the draft tokens' probabilities of being accepted, falling within each draft.
            offsets: int64 [drafts + 1], where each draft begins.

        Returns:
            int64 [drafts], tokens of each.
        """
        return np.diff(offsets)

    def choose_paths(
        self, state: StepState, drafted: int, acceptance: np.ndarray, offsets: np.ndarray, overhead: np.ndarray
    ) -> np.ndarray:
        """Say after `choose`, which chose `drafted` draft tokens, how many own tokens of further paths to verify.

        `overhead`: int64 [paths], tokens that verifying a path costs beside its own.
        """
        return np.diff(offsets)

    def observe(self, state: StepState, drafted: int, accepted: int, milliseconds: float) -> None:
        """Learn from the finished step of `state`: draft tokens verified, draft tokens accepted, and its duration."""

    def count(self, name: str, steps: int = 1) -> None:
        """Add to a counter."""
        self.counters[name] = self.counters.get(name, 0) + steps


def warm_up() -> None:
    """Compile every kernel, so that no engine step waits for it."""
    policy = Goodput(1)
    state = StepState(1)
    policy.choose(state, np.array([0.5], np.float32), np.array([0, 1]))
    policy.choose_paths(state, 1, np.array([0.5], np.float32), np.array([0, 1]), np.array([1]))


@compiled
def choose_lengths(acceptance, offsets, requests, cost, min_gain):
    """Choose the draft tokens that maximise expected tokens per millisecond.

    Args:
        acceptance, offsets: as of Policy.choose.
        requests: in the step, each of which brings one token without drafts.
        cost: float64 [n + 1], milliseconds of a step with 0 to n draft tokens, until all ranks are through.
        min_gain: gain in goodput, as a share, below which nothing is verified.

    Returns:
        int64 [drafts], tokens of each; and the draft tokens expected to be accepted.
    """
    order = np.argsort(-acceptance, kind="mergesort")  # stable: of equal tokens of a draft the first comes first
    plain = requests / cost[0]
    expected = 0.0
    best = plain
    best_drafted = 0
    best_expected = 0.0
    for drafted in range(1, min(order.size, cost.size - 1) + 1):
        expected += acceptance[order[drafted - 1]]
        goodput = (requests + expected) / cost[drafted]
        if goodput > best:
            best = goodput
            best_drafted = drafted
            best_expected = expected
    if best < (1.0 + min_gain) * plain:
        best_drafted = 0
        best_expected = 0.0
    lengths = np.zeros(offsets.size - 1, np.int64)
    if lengths.size:
        for at in order[:best_drafted]:
            lengths[np.searchsorted(offsets, at, side="right") - 1] += 1
    return lengths, best_expected


@compiled
def add_rows(acceptance, offsets, overhead, requests, drafted, expected, cost, min_gain):
    """Choose further paths, each a row of the batch: those with most expected tokens for each of their own first, as
    long as each raises expected tokens per millisecond by the share `min_gain`.

    Args:
        acceptance, offsets, overhead: as of Policy.choose_paths.
        drafted, expected: draft tokens of the step, and of them those expected to be accepted, without further paths.
        requests, cost: as of `choose_lengths`.

    Returns:
        int64 [paths], own tokens taken of each; and the draft tokens expected in all.
    """
    paths = overhead.size
    ratio = np.zeros(paths)
    gain = np.zeros(paths)
    tokens = np.zeros(paths, np.int64)
    taken = np.zeros(paths, np.int64)
    chosen = np.zeros(paths, np.int64)
    for i in range(paths):
        total = 0.0
        for j in range(offsets[i], offsets[i + 1]):
            total += acceptance[j]
            own = j + 1 - offsets[i]
            row = overhead[i] + own
            if total / row > ratio[i]:
                ratio[i] = total / row
                gain[i] = total
                tokens[i] = row
                taken[i] = own
    for i in np.argsort(-ratio):
        after = drafted + tokens[i]
        if taken[i] == 0 or after >= cost.size:
            continue
        if (requests + expected + gain[i]) / cost[after] > (1.0 + min_gain) * (requests + expected) / cost[drafted]:
            chosen[i] = taken[i]
            drafted = after
            expected += gain[i]
    return chosen, expected


class Pause:
    """Steps without drafting after drafts that were not worth verifying, or of which too few were accepted: twice as
    many each time, until drafts bring again what is expected of them."""

    def __init__(self):
        self.steps = self._failures = 0  # those that are left
        self._expected = self._accepted = 0.0  # decaying sums over the steps with drafts

    def begin(self, first: int) -> None:
        """Begin one of `first` steps, or of twice as many after each failure before."""
        self.steps = min(MAX_PAUSE_STEPS, first << self._failures)
        self._failures = min(self._failures + 1, 8)

    def compare(self, expected: float, accepted: int) -> None:
        """Begin if far fewer draft tokens are accepted than expected."""
        keep = ACCEPTANCE_DECAY ** min(1.0, expected)
        self._expected = keep * self._expected + expected
        self._accepted = keep * self._accepted + accepted
        if self._expected <= MIN_EXPECTED:
            return
        if self._accepted >= MIN_ACCEPTED_SHARE * self._expected:
            self._failures = 0
        else:
            self.begin(REJECTED_PAUSE_STEPS)
            self._expected = self._accepted = 0.0


class Goodput(Policy):
    """Verify in each step the draft tokens with the highest goodput, and none where speculation would not pay.

    Only steps with draft tokens tell what these cost. So that a table that says far too much is found out, now and then
    a step explores: it verifies what would pay at a fraction of the cost, after so many steps without drafts that it
    loses a small share of their time. Where every step has drafts, now and then some have none.

    Args:
        num_speculative_tokens: draft tokens of a request at most.
        step_cost: milliseconds of a step; None starts from a guess that the first observed steps replace.
        graph_sizes: tokens of the captured graphs: a step takes as long as the next larger graph.
        paths: of a request at most, each of as many draft tokens.

    Attributes:
        has_table: whether the step costs were measured.
        counters: declined_steps (drafted, nothing worth verifying), of which exploring_steps (verified all the same),
            and paused_steps (not drafted after that).
    """

    def __init__(
        self,
        num_speculative_tokens: int,
        step_cost: StepCost | None = None,
        graph_sizes: tuple[int, ...] = (),
        paths: int = 1,
    ):
        super().__init__()
        self.num_speculative_tokens = num_speculative_tokens
        guess = linear(1.0, 0.0, 1 / 64, source="a guess: 64 tokens double a step")
        self.cost = ExpectedCost(num_speculative_tokens, graph_sizes, paths)
        self.use_table(step_cost or guess, forward_only=step_cost is None)
        self.has_table = step_cost is not None
        self._pause = Pause()
        self._running = 0
        self._is_on = False
        self._expected = 0.0  # of the drafts last chosen, the tokens expected to be accepted
        # Steps in a row without draft tokens, as far as is known; and with some that are thought to pay.
        self._plain_steps = 0
        self._drafted_steps = DRAFTED_STEPS - FIRST_DRAFTED_STEPS
        self._is_exploring = False  # whether the step is done to learn from it

    def use_table(self, step_cost: StepCost, forward_only: bool = False) -> None:
        """Replace the table, for example when the engine has measured one; `forward_only`: of forward passes only."""
        self.has_table = True
        self.cost.use(step_cost, forward_only)

    def step_ms(self, state: StepState) -> np.ndarray:
        """float64 [n + 1]: milliseconds that a step with 0 to n draft tokens is thought to take."""
        return self.cost.of(state)[0]

    @property
    def _affordable(self) -> float:
        """What an exploring step may add now, in steps without drafts."""
        return min(LOSS_SHARE * self._plain_steps, MAX_LOSS)

    def plan(self, state: StepState) -> Plan:
        """Ask for drafts unless there is a pause, no draft token can pay, or a step without is to be observed."""
        self._spend_pause(state.steps_since_plan - 1)
        self._plain_steps += state.steps_since_plan
        if state.running != self._running:
            self._running = state.running
            self._pause.steps = min(self._pause.steps, 1)
        if self._drafted_steps >= DRAFTED_STEPS:
            self._drafted_steps = (self._drafted_steps + 1) % (DRAFTED_STEPS + PLAIN_STEPS + 1)
        self._is_exploring = self._drafted_steps > DRAFTED_STEPS
        if self._is_exploring:
            return Plan(0)
        if self._pause.steps > 0:
            self._spend_pause(1)
            return Plan(0, valid_for_steps=min(self._pause.steps, MAX_VALID_FOR_STEPS))
        _, floor = self.cost.of(state)
        if min(floor, MAX_LOSS) <= self._affordable:
            floor *= COST_SHARE
        if floor >= MAX_ACCEPTANCE:
            return Plan(0)
        return Plan(self.num_speculative_tokens, floor)

    def _spend_pause(self, steps: int) -> None:
        self._pause.steps = max(0, self._pause.steps - steps)
        if steps:
            self.count("paused_steps", steps)

    def choose(self, state: StepState, acceptance: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Choose the draft tokens with the highest goodput; if that is without any, pause, or explore."""
        cost = self.step_ms(state)
        min_gain = MIN_GAIN_ON if self._is_on else MIN_GAIN_OFF
        lengths, self._expected = choose_lengths(acceptance, offsets, state.running, cost, min_gain)
        self._is_on = self._expected > 0
        if self._is_on:
            self._plain_steps = 0
            self._drafted_steps += 1
            return lengths
        self.count("declined_steps")
        self._pause.begin(1)
        self._pause.steps -= 1  # this one was the first
        self._drafted_steps = 0
        most = int(np.searchsorted(cost, (1.0 + MAX_LOSS) * cost[0], side="right"))
        cheap = cost[0] + COST_SHARE * (cost[:most] - cost[0])
        explored, expected = choose_lengths(acceptance, offsets, state.running, cheap, min_gain)
        if explored.any() and cost[explored.sum()] <= (1.0 + self._affordable) * cost[0]:
            self.count("exploring_steps")
            self._is_exploring = True
            self._plain_steps = 0
            self._expected = expected
            return explored
        return lengths

    def choose_paths(
        self, state: StepState, drafted: int, acceptance: np.ndarray, offsets: np.ndarray, overhead: np.ndarray
    ) -> np.ndarray:
        """Choose the further paths that raise goodput."""
        cost = self.step_ms(state)
        min_gain = MIN_GAIN_ON / max(1, state.running)
        chosen, self._expected = add_rows(
            acceptance, offsets, overhead, state.running, drafted, self._expected, cost, min_gain
        )
        return chosen

    def observe(self, state: StepState, drafted: int, accepted: int, milliseconds: float) -> None:
        """Compare acceptance with what was expected, and learn what the step took beyond the table."""
        if drafted:
            self._pause.compare(self._expected, accepted)
        self.cost.observe(state, drafted, milliseconds, is_wanted=self._is_exploring)


class Threshold(Policy):
    """Speculate while at most `batch_size_threshold` requests run, as the published recipe does."""

    def __init__(self, num_speculative_tokens: int, batch_size_threshold: int):
        super().__init__()
        self.num_speculative_tokens = num_speculative_tokens
        self.batch_size_threshold = batch_size_threshold

    def plan(self, state: StepState) -> Plan:
        """Compare the requests that run with the threshold."""
        if state.running > self.batch_size_threshold:
            return Plan(0, valid_for_steps=NO_THRESHOLD)
        return Plan(self.num_speculative_tokens)


def make_policy(name: str, num_speculative_tokens: int, batch_size_threshold: int, **goodput) -> Policy:
    """Build a policy by its name, one of sam.config.POLICIES; `goodput` are arguments of Goodput alone."""
    if name == "goodput":
        return Goodput(num_speculative_tokens, **goodput)
    thresholds = {"threshold": batch_size_threshold, "always": NO_THRESHOLD, "never": -1}
    return Threshold(num_speculative_tokens, thresholds[name])


@dataclass
class StepResult:
    """What a step leaves behind, for the next one, the step recorder and the scheduler."""

    state: StepState | None = None  # that the policy planned for; None if none is to be compared with the next one
    request_ids: list[str] = field(default_factory=list)  # of that step's batch
    plan: Plan = Plan(0)  # of the drafts that the next step verifies
    began: float = 0.0  # when the next step began, in seconds
    drafted: int = 0  # draft tokens of the next step
    is_on: bool = False  # whether the policy lets requests speculate in the next step
    valid_for_steps: int = 0  # further steps with as many running requests for which the policy need not be asked
    steps: int = 0  # in which it was not asked

    def holds(self, running: int) -> bool:
        """Whether the plan, of no drafts, is also that of a step with `running` requests."""
        return self.valid_for_steps > 0 and self.state.running == running


class Switch:
    """Asks a policy in each step, unless its last answer holds.

    Args:
        counters: `skipped_steps` counts the steps without drafts.

    Attributes:
        policy: that is asked.
        last: what the last step left behind.
    """

    def __init__(self, policy: Policy, counters: dict[str, int]):
        self.policy = policy
        self.last = StepResult()
        self._counters = counters
        policy.counters = counters

    @property
    def wants_drafts(self) -> bool:
        """Whether the last plan asked for drafts."""
        return self.last.plan.budget > 0

    def holds(self, now: float, running: int) -> bool:
        """Whether the last plan, of no drafts, is also that of this step, which begins at `now` seconds; it is then
        counted."""
        last = self.last
        if not last.holds(running):
            return False
        last.began = now
        last.steps += 1
        last.valid_for_steps -= 1
        self._counters["skipped_steps"] += 1
        return True

    def plan(self, now: float, state: StepState, request_ids: list[str]) -> Plan:
        """Ask the policy for the next step.

        Args:
            now: seconds.
            state: of the batch; its `steps_since_plan` is filled in here.
            request_ids: of the batch, in an order that is the same while they are.
        """
        state = replace(state, steps_since_plan=self.last.steps + 1)
        plan = self.policy.plan(state)
        valid_for_steps = 0 if plan.budget else plan.valid_for_steps
        self._counters["skipped_steps"] += not plan.budget
        self.last = StepResult(state, request_ids, plan, now, 0, plan.budget > 0, valid_for_steps)
        return plan

    def observe(self, now: float, state: StepState, request_ids: list[str], drafted: int, accepted: int) -> None:
        """Give the policy the time of the step that has just ended, if it is the one it planned: all requests in
        decode, none added or finished.

        Args:
            now, state, request_ids: as of `plan`, which is called next.
            drafted, accepted: draft tokens of the step.
        """
        last = self.last.state
        if last is None or last.prefilling or state.prefilling or self.last.request_ids != request_ids:
            return
        # Of the step that has just ended.
        last = replace(last, max_num_tokens_other_dp_ranks=state.max_num_tokens_other_dp_ranks)
        self.policy.observe(last, drafted, accepted, (now - self.last.began) * 1e3)

    def cut(self, drafts: Drafts) -> list[list[int]]:
        """The part of each draft that the policy verifies.

        Raises:
            ValueError: they are no drafts.
        """
        tokens = drafts.token_ids
        offsets = drafts.offsets
        if tokens.ndim != 1 or (tokens < 0).any():
            raise ValueError(f"drafts of shape {tokens.shape} from {tokens.min(initial=0)}: expected token ids")
        lengths = self.policy.choose(self.last.state, drafts.acceptance, offsets)
        self.last.is_on = bool(lengths.any()) or not len(drafts.acceptance)
        flat = tokens.tolist()
        ends = (offsets[:-1] + lengths).tolist()
        return [flat[begin:end] for begin, end in zip(offsets[:-1].tolist(), ends, strict=True)]
