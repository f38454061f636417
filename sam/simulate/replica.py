"""A simulated replica: its queue, its running requests, its KV cache, its policy and its drafter."""

from collections import deque
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

    Args:
        generated, targets: int64 [requests of the round], shared by all replicas: tokens that each has, and at which
            its chunk ends.
        slots: requests that run at once.
        kv_tokens: tokens that the KV cache holds; where the next step would need more, the last request to come is
            preempted, and its context is read again when it comes back, as in vLLM. 0: no bound.

    Attributes:
        running: int64 [n], requests in the batch, in the order in which they came.
        until_finish: tokens until the first of them has reached its target.
        fresh: number of those that have no token yet.
        num_tokens: tokens of the last step, drafts included.
        ended: requests that have reached their targets since the list was last cleared.
        read: tokens of context that requests brought along and whose KV cache was not there, since the last step.
        preempted, read_again: requests preempted, and tokens of context read a second time, so far.
    """

    def __init__(
        self,
        work: Round,
        generated: np.ndarray,
        targets: np.ndarray,
        slots: int,
        policy: Policy,
        drafting: Drafting,
        kv_tokens: int = 0,
    ):
        self._work, self._generated, self._targets, self._slots = work, generated, targets, slots
        self._policy, self._drafting = policy, drafting
        self._kv_tokens = kv_tokens or 1 << 60
        self._queue: deque[tuple[float, int, bool]] = deque()
        self._tokens = self._quiet = 0
        self.ended: list[int] = []
        self.read = self.preempted = self.read_again = 0
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
        return self._queue[0][0] if self._queue else float("inf")

    @property
    def steps_that_fit(self) -> int:
        """Steps of one token for each running request that the KV cache holds."""
        return max(1, (self._kv_tokens - self._tokens) // max(1, len(self.running)))

    def enqueue(self, request: int, now: float, cached: bool = False) -> None:
        """A request arrives at `now`, in milliseconds; `cached`: its context's KV cache is still here."""
        self._queue.append((now, request, cached))

    def admit(self, now: float) -> int:
        """Take arrived requests into the batch, first come first served, while there are slots and KV cache; returns
        their number."""
        new = []
        while self.next_arrival <= now and len(self.running) + len(new) < self._slots:
            _, request, cached = self._queue[0]
            context = int(self._work.prompt_tokens[request] + self._generated[request])
            rows = len(self.running) + len(new) + 1
            if rows > 1 and self._tokens + context + rows > self._kv_tokens:
                break
            self._queue.popleft()
            self._drafting.start(request)
            self._tokens += context
            self.read += 0 if cached else context
            self.read_again += 0 if cached or not self._generated[request] else context
            new.append(request)
        if new:
            self.running = np.concatenate([self.running, np.array(new, np.int64)])
            self.fresh += len(new)
            self._count_down()
        return len(new)

    def preempt(self, now: float) -> None:
        """Make room for the next step's tokens: the requests that came last go back to the head of the queue."""
        while len(self.running) > 1 and self._tokens + len(self.running) > self._kv_tokens:
            request = int(self.running[-1])
            self._leave(self.running[-1:])
            self.running = self.running[:-1]
            self._queue.appendleft((now, request, False))
            self.preempted += 1
            self._count_down()

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
        left = self._targets[running] - before
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
            running = self.running
            complete = self._generated[running] >= self._targets[running]
            self._leave(running[complete])
            self.ended += running[complete].tolist()
            self.running = running[~complete]
            self._count_down()

    def _leave(self, requests: np.ndarray) -> None:
        for request in requests.tolist():
            self._drafting.finish(request)
        self._tokens -= int((self._generated[requests] + self._work.prompt_tokens[requests]).sum())

    def _count_down(self) -> None:
        running = self.running
        self.until_finish = int((self._targets[running] - self._generated[running]).min(initial=1 << 60))
