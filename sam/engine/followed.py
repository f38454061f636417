"""The session of all loops: it keeps the requests' texts itself, and drafts from them.

It is told of prompts when requests start, and of tokens when those of a step have come to the host.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sam.config import SpeculationConfig
from sam.drafting.drafter import Drafter
from sam.engine.hints import is_continued, response_of, response_start
from sam.engine.session import MAX_STEPS_BEHIND, Session
from sam.record.engine_steps import accepted_tokens
from sam.switch.step_cost import StepState

STEPS_UNDER_WAY = 3  # whose copies may not have ended; vLLM schedules two at once
COUNTERS = ("late_steps", "waited_steps")


@dataclass
class Step:
    """What a step brought, or will have brought once its tokens have come to the host."""

    request_ids: list[str]  # of its rows
    emits: np.ndarray  # bool [rows], False for a row that is still in its prompt
    context: float  # mean tokens of its rows' texts
    had_drafts: bool
    tokens: np.ndarray  # int [rows, 1 + longest draft], on the host once `copied` is over
    # int [rows], tokens of each row that are kept, likewise; 0 for a row still in its prompt. None until it is `read`:
    # those that are no padding, which is negative.
    counts: np.ndarray | None
    copied: Any  # event of the copies of both; None: they are on the host
    verified: np.ndarray | None = None  # int [rows], draft tokens of each; None where nobody asks

    def read(self) -> None:
        """Wait for its tokens."""
        if self.copied is not None:
            self.copied.synchronize()
        if self.counts is None:
            self.counts = (self.tokens >= 0).sum(axis=1) * self.emits


@dataclass
class Text:
    """A request's text so far, as sam.engine.hints reads it; `sampling_params` are vLLM's."""

    sampling_params: Any
    prompt_token_ids: list[int]
    output_token_ids: list[int]
    _array: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    _converted: int = 0  # tokens that are in it

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def behind(self, place: int) -> list[int]:
        """Tokens from a place on."""
        begin = self.num_prompt_tokens
        return self.prompt_token_ids[place:] + self.output_token_ids[max(0, place - begin) :]

    def array(self) -> np.ndarray:
        """int32 [length]; what was asked for before is not converted again."""
        if len(self) > len(self._array):
            self._array = np.resize(self._array, 2 * len(self))
        self._array[self._converted : len(self)] = self.behind(self._converted)
        self._converted = len(self)
        return self._array[: len(self)]


class FollowingSession(Session):
    """Tells the drafter, and a history where there is one, in order what has happened, when it is asked to.

    Args:
        is_async: whether steps are scheduled before the tokens of the one before are known; COUNTERS are counted then.

    Attributes:
        max_num_tokens_other_dp_ranks: of the last step, as of sam.switch.step_cost.StepState.
        texts: of each followed request.
        trained: a TrainedDrafter of sam.vllm.trained, which may replace drafts.
        paths: the PathRows of sam.vllm.paths, which may plan further paths.
    """

    def __init__(
        self, config: SpeculationConfig, drafter: Drafter, goodput_only: dict, max_model_len: int, is_async: bool
    ):
        super().__init__(config, drafter, goodput_only)
        if is_async:
            self.counters.update(dict.fromkeys(COUNTERS, 0))
        self.max_num_tokens_other_dp_ranks = 0
        self.texts: dict[str, Text] = {}
        self.trained: Any = None
        self.paths: Any = None
        self._max_model_len = max_model_len
        self._is_async = is_async
        self._was_known = False  # whether the last step's tokens were waited for
        self._behind: dict[str, None] = {}  # those of which the drafter lacks tokens
        self._unread: deque[Step | tuple[str, Text] | set[str]] = deque()

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
        self.deliver(time.perf_counter())
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
        return StepState(running, prefilling, step.context, self.max_num_tokens_other_dp_ranks)

    def _is_due(self, now: float) -> bool:
        """Whether to read at `now` seconds although nothing is drafted."""
        return now >= self.shares_at or sum(isinstance(event, Step) for event in self._unread) >= MAX_STEPS_BEHIND

    def _follow(self, name: str, text: Text) -> None:
        if name not in self.texts:
            prompt, given = np.split(np.asarray(text.prompt_token_ids, dtype=np.int32), [response_start(text)])
            if not self.start_request(name, prompt, given):
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
                self.end_request(name, [])

    def _finish(self, names: set[str]) -> None:
        ended = sorted(names & self.texts.keys())
        try:
            self._tell([name for name in ended if name in self._behind])
        finally:
            for name in ended:
                if (text := self.texts.pop(name, None)) is not None:
                    # The text of a part is kept with the response's last part, which begins with it.
                    self.end_request(name, [] if is_continued(text) else response_of(text))
