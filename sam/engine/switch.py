"""The switch of an engine: what the policy plans for the next step, and what it learns of the last one."""

from dataclasses import dataclass, field, replace

from sam.drafting.texts import Drafts
from sam.switch.policies import Plan, Policy
from sam.switch.step_cost import StepState


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
