"""The session of an engine, in all loops: it keeps the requests' texts, plans each step and drafts for it.

It is told of prompts when requests start, and of tokens when those of a step have come to the host. It holds the
drafter, its history and its switch. A fault in drafting ends here.
"""

import logging
import math
import time
from collections import deque
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from sam.config import SpeculationConfig
from sam.drafting.drafter import Drafter
from sam.engine.requests import Step, Text, accepted_tokens, is_continued, response_of, response_start
from sam.guard import guard
from sam.history.client import HistoryClient
from sam.sharing.client import INTERVAL_SECONDS
from sam.sharing.drafter import read_corpus_into, share_by_link
from sam.switch.policies import Policy, StepResult, Switch, make_policy, warm_up
from sam.switch.step_cost import StepState

logger = logging.getLogger(__name__)

COUNTERS = ("tracked_requests", "untracked_requests", "draft_errors", "skipped_steps", "policy_version")
ASYNC_COUNTERS = ("late_steps", "waited_steps")
# Steps without drafts after which the drafter is given the tokens of all of them at once.
MAX_STEPS_BEHIND = 32
STEPS_UNDER_WAY = 3  # whose copies may not have ended; vLLM schedules two at once


class Session:
    """Tells the drafter, and a history where there is one, in order what has happened, when it is asked to.

    An error in drafting never fails or changes a rollout: the step goes on without drafts, and the error is counted in
    `counters["draft_errors"]` and logged once.

    Args:
        drafter: follows the engine's requests.
        goodput_only: further arguments of sam.switch.policies.make_policy.
        max_model_len: tokens of a text at most.
        is_async: whether steps are scheduled before the tokens of the one before are known; ASYNC_COUNTERS are counted
            then.

    Attributes:
        history: None without one.
        paths: the PathRows of sam.vllm.paths, which may plan further paths.
        shares_at: seconds from which on new text is to be sent to other replicas.
        switch: says what is drafted.
        texts: of each followed request.
        trained: a TrainedDrafter of sam.vllm.trained, which may replace drafts.
    """

    def __init__(
        self, config: SpeculationConfig, drafter: Drafter, goodput_only: dict, max_model_len: int, is_async: bool
    ):
        self.drafter = drafter
        self.counters.update(dict.fromkeys(COUNTERS, 0))
        if is_async:
            self.counters.update(dict.fromkeys(ASYNC_COUNTERS, 0))
        policy = make_policy(config.policy, drafter.max_draft_tokens, config.batch_size_threshold, **goodput_only)
        self.switch = Switch(policy, self.counters)
        self.history: HistoryClient | None = None
        self.shares_at = math.inf
        self.texts: dict[str, Text] = {}
        self.trained: Any = None
        self.paths: Any = None
        self._max_model_len = max_model_len
        self._is_async = is_async
        self._was_known = False  # whether the last step's tokens were waited for
        self._behind: dict[str, None] = {}  # those of which the drafter lacks tokens
        self._unread: deque[Step | tuple[str, Text] | set[str]] = deque()

    @property
    def counters(self) -> dict[str, int]:
        """Those of COUNTERS, and the drafter's own: everything in it goes to the metrics."""
        return self.drafter.counters

    def warm_up(self) -> None:
        """Compile the kernels, so that no step waits for them."""
        started = time.perf_counter()
        self.drafter.warm_up()
        warm_up()
        logger.info("drafter compiled in %.1f s", time.perf_counter() - started)

    def begin(self, config: SpeculationConfig, model_config) -> None:
        """Read what the drafter is to know before the first request, on the rank that drafts; `model_config` is vLLM's.

        Raises:
            ReadError: the corpus cannot be read, or is of another tokenizer.
        """
        read_corpus_into(self.drafter, config, model_config)
        self.history = HistoryClient.of_engine(config, model_config, self.counters)
        if self.history:
            self.history.start()

    def harmless(self) -> AbstractContextManager[None]:
        """Count what fails: the rollout goes on without drafts."""
        return guard(logger, self.counters, "draft_errors", "drafting failed; the rollout goes on without drafts")

    def share(self, address: str) -> None:
        """Exchange text with the drafters of other replicas from now on, where speculation.sharing asks for it, by the
        address at which the replica's server listens (sam.sharing.link)."""
        if share_by_link(self.drafter, address):
            self.shares_at = 0.0

    def weights_updated(self) -> None:
        """Count a weight sync: the history keeps responses by their weights. What has happened is read before, since no
        step comes after the responses that end last."""
        self.counters["policy_version"] += 1
        if self.history:
            with self.harmless():
                self.read()
            self.history.weights_updated()

    def started(self, request_id: str, text: Text) -> None:
        """Note a new request; one that has been preempted starts again."""
        self._unread.append((request_id, text))

    def ended(self, request_ids: set[str]) -> None:
        """Note that requests are gone, finished or aborted."""
        if request_ids:
            self._unread.append(set(request_ids))

    def stepped(self, step: Step) -> None:
        """Note what a step brings; its copies need not have ended."""
        self._unread.append(step)

    def read(self, except_steps: int = 0) -> None:
        """Tell the drafter what has happened, waiting for the tokens of steps under way.

        Args:
            except_steps: last steps that are left for the next call.
        """
        self._deliver(time.perf_counter())
        steps = sum(isinstance(event, Step) for event in self._unread)
        while self._unread and not (isinstance(self._unread[0], Step) and steps <= except_steps):
            match self._unread.popleft():  # whatever fails in the drafter fails once
                case Step() as step:
                    steps -= 1
                    self._take(step)
                case (name, text):
                    self._follow(name, text)
                case finished:
                    self._finish(finished)
        self._tell(list(self._behind))

    def draft(self, step: Step, is_known: bool) -> dict[str, list[int]]:
        """Plan the next step, and draft for it.

        Args:
            step: the last one of which it was told.
            is_known: whether its tokens may be waited for; else nothing is drafted.

        Returns:
            Drafts of the requests that get any.
        """
        with self.harmless():
            return self._draft(step, is_known)
        with self.harmless():  # should planning fail in every step, text is kept short all the same
            if self._is_due(time.perf_counter()):
                self.read(STEPS_UNDER_WAY)
        return {}

    def _draft(self, step: Step, is_known: bool) -> dict[str, list[int]]:
        was_known = self._was_known
        self._was_known = is_known
        if is_known:
            if self._is_async:
                self.counters["waited_steps"] += 1
            step.read()
        now = time.perf_counter()
        self._plan(now, step, is_known, was_known)
        plan = self.switch.last.plan
        if not plan.budget:
            if self._is_due(now):
                self.read(STEPS_UNDER_WAY)
            return {}
        if not is_known:
            self.counters["late_steps"] += 1
            return {}
        self.read()
        rows = zip(step.request_ids, step.counts.tolist(), strict=True)
        names = [name for name, count in rows if count and name in self.texts]
        if not names:
            return {}
        lengths = np.array([len(self.texts[name]) for name in names])
        budgets = np.clip(self._max_model_len - 1 - lengths, 0, plan.budget).astype(np.int32)
        drafts = self.drafter.draft(names, budgets, plan.min_acceptance)
        policy = self.switch.policy
        state = self.switch.last.state
        if self.trained:
            texts = [self.texts[name].array() for name in names]
            drafts = self.trained.combine(policy, state, plan.budget, names, texts, drafts)
        chosen = self.switch.cut(drafts)
        if self.paths and any(chosen):
            chosen = self.paths.plan(policy, state, names, chosen, budgets)
        return {name: draft for name, draft in zip(names, chosen, strict=True) if draft}

    def _plan(self, now: float, step: Step, is_known: bool, was_known: bool) -> None:
        running = len(step.request_ids)
        if self.switch.holds(now, running):
            return
        state = self.state_of(step)
        names = sorted(step.request_ids)  # whose order is the runner's, by tokens of a step
        last = self.switch.last
        if self.trained:  # the time of its passes is their own, not the step's
            last.began += self.trained.arrive() / 1e3
        # Between a step that waited for the device and one that did not lies more or less than one step's time. And one
        # that waited and had no drafts is neither a step with drafts nor a plain one, which waits for nobody.
        if not self._is_async or (was_known == is_known and (last.drafted or not is_known)):
            accepted = accepted_tokens(int(step.counts.sum()), verified=running) if is_known else 0
            self.switch.observe(now, state, names, last.drafted, accepted)
        self.switch.plan(now, state, names)

    def state_of(self, step: Step) -> StepState:
        """A step's, as the policy knows it."""
        running = len(step.request_ids)
        prefilling = running - int(step.emits.sum())
        return StepState(running, prefilling, step.context, step.max_num_tokens_other_dp_ranks)

    def _is_due(self, now: float) -> bool:
        """Whether to read at `now` seconds although nothing is drafted."""
        return now >= self.shares_at or sum(isinstance(event, Step) for event in self._unread) >= MAX_STEPS_BEHIND

    def _follow(self, name: str, text: Text) -> None:
        if name not in self.texts:
            prompt, given = np.split(np.asarray(text.prompt_token_ids, dtype=np.int32), [response_start(text)])
            if not self._start(name, prompt, given):
                return
        self.texts[name] = text
        self._behind[name] = None

    def _take(self, step: Step) -> None:
        try:
            step.read()
            for name, tokens, count in zip(step.request_ids, step.tokens.tolist(), step.counts.tolist(), strict=True):
                if count and name in self.texts:
                    self.texts[name].output_token_ids += tokens[:count]
                    self._behind[name] = None
        except Exception:  # whatever it is, it ends in the session's guard
            self._lose(step.request_ids)
            raise

    def _tell(self, names: list[str]) -> None:
        """Give the drafter what it lacks of texts; after a preemption tokens come again that it has."""
        for name in names:
            del self._behind[name]
        if not names:
            return
        try:
            known = self.drafter.lengths(names).tolist()
            new = [self.texts[name].behind(place) for name, place in zip(names, known, strict=True)]
            offsets = np.cumsum([0, *map(len, new)])
            if offsets[-1]:
                self.drafter.append(names, np.concatenate(new).astype(np.int32), offsets)
        except Exception:  # as above
            self._lose(names)
            raise

    def _lose(self, names: list[str]) -> None:
        """A part of their text is lost: no drafts for them from now on, and nothing kept."""
        for name in names:
            self._behind.pop(name, None)
            if self.texts.pop(name, None) is not None:
                self._end(name, [])

    def _finish(self, names: set[str]) -> None:
        ended = sorted(names & self.texts.keys())
        try:
            self._tell([name for name in ended if name in self._behind])
        finally:
            for name in ended:
                if (text := self.texts.pop(name, None)) is not None:
                    # The text of a part is kept with the response's last part, which begins with it.
                    self._end(name, [] if is_continued(text) else response_of(text))

    def _deliver(self, now: float) -> None:
        """Give the drafter what its history has found; it is about to be told of new text, at `now` seconds."""
        if self.shares_at < math.inf:
            self.shares_at = now + INTERVAL_SECONDS
        if self.history:
            self.history.deliver(self.drafter)

    def _start(self, request_id: str, prompt: np.ndarray, given: np.ndarray) -> bool:
        """Follow a request with `prompt`, which goes on with `given` (both int32 [length]); False if it cannot be."""
        try:
            if self.history:
                self.history.request_started(request_id, prompt, self.drafter)
            self.drafter.start(request_id, prompt, given)
        except ValueError as error:
            if self.counters["untracked_requests"] == 0:
                logger.warning("no drafts for a request: %s (logged once, then counted)", error)
            self.counters["untracked_requests"] += 1
            if self.history:
                self.history.request_finished(request_id, [])
            return False
        self.counters["tracked_requests"] += 1
        return True

    def _end(self, request_id: str, response: list[int]) -> None:
        """A request is gone; an empty response is not kept."""
        self.drafter.finish(request_id)
        if self.history:
            self.history.request_finished(request_id, response)


class Drafting:
    """What drafts by a `session`, as others see it, whichever model runner it serves."""

    session: Session

    @property
    def counters(self) -> dict[str, int]:
        """Of the session: everything in it goes to the metrics."""
        return self.session.counters

    @property
    def drafter(self) -> Drafter:
        """That follows the engine's requests."""
        return self.session.drafter

    @property
    def policy(self) -> Policy:
        """That says what is drafted."""
        return self.session.switch.policy

    @property
    def last(self) -> StepResult:
        """What the last step left behind."""
        return self.session.switch.last

    @property
    def wants_drafts(self) -> bool:
        """Whether the last plan asked for drafts."""
        return self.session.switch.wants_drafts
