"""A simulated replica: its queue, its running requests, its policy and its drafter."""

from dataclasses import replace

import numpy as np

from sam.simulate.drafting import Drafting
from sam.simulate.lengths import Round
from sam.switch.goodput import CONTEXT_BUCKET, MAX_COOL_DOWN_STEPS
from sam.switch.policies import Threshold
from sam.switch.policy import Plan, Policy, StepState

# Steps without drafts in the same state after which a policy will not ask for any until the state changes.
QUIET_STEPS = MAX_COOL_DOWN_STEPS + 2
NO_REQUESTS = np.empty(0, np.int64)


class Replica:
    """One data-parallel rank of an engine, or a whole engine.

    Attributes:
        running: int64 [n], requests in the batch, in the order in which they came.
        until_finish: tokens until the first of them is complete.
        fresh: number of those that have no token yet.
        num_tokens: tokens of the last step, drafts included.
    """

    def __init__(
        self, work: Round, queue: np.ndarray, generated: np.ndarray, slots: int, policy: Policy, drafting: Drafting
    ):
        self._work, self._queue, self._generated, self._slots = work, queue, generated, slots
        self._policy, self._drafting = policy, drafting
        self._next = self._tokens = self._quiet = 0
        self._quiet_state = (0, 0)
        self.running, self.until_finish, self.fresh = NO_REQUESTS, 0, 0
        self.state, self.plan = StepState(0), Plan(0)
        self.drafted = self.accepted = self.verified = self.emitted = self.num_tokens = 0
        self.switch_on = False

    def __len__(self) -> int:
        """Requests in the batch."""
        return len(self.running)

    @property
    def context(self) -> float:
        """Mean tokens of a running request."""
        return self._tokens / max(1, len(self.running))

    @property
    def next_arrival(self) -> float:
        """Milliseconds at which the first request of the queue arrives or arrived; infinite without one."""
        return float(self._work.arrivals[self._queue[self._next]]) if self._next < len(self._queue) else float("inf")

    def admit(self, now: float) -> int:
        """Take arrived requests into the batch, first come first served; returns their number."""
        first = self._next
        while self.next_arrival <= now and len(self.running) + self._next - first < self._slots:
            self._drafting.start(int(self._queue[self._next]))
            self._next += 1
        if admitted := self._next - first:
            new = self._queue[first : self._next]
            self.running = np.concatenate([self.running, new])
            self._tokens += int(self._work.prompt_tokens[new].sum())
            self.fresh += admitted
            self._count_down()
        return admitted

    def make_plan(self, max_num_tokens_other: int) -> int:
        """Ask the policy for a plan; returns the draft tokens that a request may have."""
        running, context = len(self.running), self.context
        self.state = StepState(running, self.fresh, 0, context, max_num_tokens_other)
        self.plan = self._policy.plan(self.state)
        key = (running, int(context) // CONTEXT_BUCKET)
        self._quiet = self._quiet + 1 if self.plan.budget == 0 and key == self._quiet_state else 0
        self._quiet_state = key
        return self.plan.budget

    @property
    def steady(self) -> bool:
        """Whether the policy will ask for no drafts while the batch and its context bucket stay the same."""
        return self.plan.budget == 0 and (isinstance(self._policy, Threshold) or self._quiet >= QUIET_STEPS)

    def step(self) -> None:
        """Draft, verify and advance by one engine step.

        Sets `drafted`, `accepted`, `emitted` and `num_tokens`, counts of tokens, and `verified`, requests with drafts.
        """
        running = self.running
        if self.plan.budget == 0 or self.fresh == len(running):
            self.jump(1)
            return
        before = self._generated[running]
        budgets = np.where(before > 0, self.plan.budget, 0)
        acceptance, offsets = self._drafting.draft(running, before, budgets, self.plan.min_acceptance)
        lengths = self._policy.choose(self.state, acceptance, offsets)
        left = self._work.lengths[running] - before
        accepted = np.minimum(self._drafting.verify(lengths), left)
        tokens = np.minimum(accepted + 1, left)
        self.drafted, self.accepted, self.emitted = int(lengths.sum()), int(accepted.sum()), int(tokens.sum())
        self.verified = int(np.count_nonzero(lengths))
        self.switch_on = self.drafted > 0 or not len(acceptance)
        self._advance(tokens)
        self._count_down()

    def jump(self, steps: int) -> None:
        """Advance by `steps` steps without drafts."""
        self.drafted = self.accepted = self.verified = 0
        self.switch_on = False
        self.emitted = steps * len(self.running)
        self._advance(steps)
        self.until_finish -= steps

    def _advance(self, tokens: np.ndarray | int) -> None:
        self._generated[self.running] += tokens
        self._tokens += self.emitted
        self.num_tokens, self.fresh = len(self.running) + self.drafted, 0

    def finish_step(self, milliseconds: float, observed: bool, max_num_tokens_other: int = 0) -> None:
        """After a step or a jump: show its tokens to the drafter and its time to the policy; drop complete requests.

        Args:
            max_num_tokens_other: tokens of the largest batch of the other ranks in this step; `make_plan` is given that
                of the step before.
        """
        self._drafting.append(self.running, self._generated[self.running])
        if observed:
            state = replace(self.state, max_num_tokens_other_dp_ranks=max_num_tokens_other)
            self._policy.observe(state, self.drafted, self.accepted, milliseconds)
        if self.until_finish == 0:
            work, running = self._work, self.running
            complete = self._generated[running] >= work.lengths[running]
            for request in running[complete].tolist():
                self._drafting.finish(request)
                self._tokens -= int(work.lengths[request] + work.prompt_tokens[request])
            self.running = running[~complete]
            self._count_down()

    def _count_down(self) -> None:
        running = self.running
        self.until_finish = int((self._work.lengths[running] - self._generated[running]).min(initial=1 << 60))
