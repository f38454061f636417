"""The text of an engine's requests as the host learns it: prompts when they are scheduled, tokens from the copies that
the runner makes for the scheduler."""

import math
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sam.drafting.drafter import Drafter
from sam.history.client import HistoryClient
from sam.sharing.client import INTERVAL_SECONDS
from sam.vllm.hints import is_continued, response_of, response_start
from sam.vllm.tracked_requests import MAX_STEPS_BEHIND, start_request

COUNTERS = ("tracked_requests", "untracked_requests", "policy_version")


class Step(NamedTuple):
    """What a step brought, as far as it has come to the host."""

    request_ids: list[str]  # of its rows
    tokens: np.ndarray  # int64 [rows, 1 + k], on the host once `copied`
    counts: np.ndarray  # int32 [rows], tokens of each row that are kept; 0 for a row still in its prompt
    copied: Any  # event of the copies of both


@dataclass
class Text:
    """A request's text so far, as sam.vllm.hints reads it; `sampling_params` are vLLM's."""

    sampling_params: Any
    prompt_token_ids: list[int]
    output_token_ids: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def behind(self, place: int) -> list[int]:
        """Tokens from a place on."""
        begin = self.num_prompt_tokens
        return self.prompt_token_ids[place:] + self.output_token_ids[max(0, place - begin) :]


class FollowedRequests:
    """Tells the drafter, and a history where there is one, in order what has happened, when it is asked to.

    Args:
        counters: those of COUNTERS.

    Attributes:
        shares_at: seconds from which on new text is to be sent to other replicas.
    """

    def __init__(self, drafter: Drafter, counters: dict[str, int], history: HistoryClient | None = None):
        self._drafter, self._counters, self.history = drafter, counters, history
        self._texts: dict[str, Text] = {}  # of each followed request
        self._behind: dict[str, None] = {}  # those of which the drafter lacks tokens
        self._unread: deque[Step | tuple[str, Text] | set[str]] = deque()
        self.shares_at = math.inf

    def schedule(self, scheduler_output) -> None:
        """Note which requests have finished and which are new; a preempted one stays, and comes back as new."""
        if scheduler_output.finished_req_ids:
            self._unread.append(set(scheduler_output.finished_req_ids))
        for request in scheduler_output.scheduled_new_reqs:
            # vLLM's own before it serves: _warmup_0_, _v2_mixed_warmup_decode_.
            if (tokens := request.prefill_token_ids) and not (request.req_id[0] == "_" and "warmup_" in request.req_id):
                prompt, response = tokens[: request.prompt_len], tokens[request.prompt_len :]
                self._unread.append((request.req_id, Text(request.sampling_params, list(prompt), list(response))))

    def end_step(self, step: Step) -> None:
        """Note what a step brings; its copies need not have ended."""
        self._unread.append(step)

    def is_due(self, now: float) -> bool:
        """Whether to read at `now` seconds although nothing is drafted."""
        return now >= self.shares_at or sum(isinstance(one, Step) for one in self._unread) >= MAX_STEPS_BEHIND

    def read(self, now: float, except_steps: int = 0) -> None:
        """Tell the drafter what has happened, waiting for the tokens of steps under way.

        Args:
            now: seconds.
            except_steps: last steps that are left for the next call.
        """
        if self.shares_at < math.inf:
            self.shares_at = now + INTERVAL_SECONDS
        if self.history:
            self.history.deliver(self._drafter)
        steps = sum(isinstance(one, Step) for one in self._unread)
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

    def rows_of(self, step: Step) -> list[int]:
        """Rows that can be drafted for."""
        return [row for row, count in enumerate(step.counts.tolist()) if count and step.request_ids[row] in self._texts]

    def lengths(self, request_ids: list[str]) -> np.ndarray:
        """int64 [requests], tokens of each."""
        return np.array([len(self._texts[name]) for name in request_ids], dtype=np.int64)

    def _follow(self, name: str, text: Text) -> None:
        if name not in self._texts and not self._start(name, text):
            return
        self._texts[name], self._behind[name] = text, None

    def _start(self, name: str, text: Text) -> bool:
        prompt, given = np.split(np.asarray(text.prompt_token_ids, dtype=np.int32), [response_start(text)])
        return start_request(self._drafter, self.history, self._counters, name, prompt, given)

    def _take(self, step: Step) -> None:
        try:
            step.copied.synchronize()
            for name, tokens, count in zip(step.request_ids, step.tokens.tolist(), step.counts.tolist(), strict=True):
                if count and name in self._texts:
                    self._texts[name].output_token_ids += tokens[:count]
                    self._behind[name] = None
        except Exception:
            self._lose(step.request_ids)
            raise

    def _tell(self, names: list[str]) -> None:
        """Give the drafter what it lacks of texts; after a preemption tokens come again that it has."""
        for name in names:
            del self._behind[name]
        if not names:
            return
        try:
            known = self._drafter.lengths(names).tolist()
            new = [self._texts[name].behind(place) for name, place in zip(names, known, strict=True)]
            offsets = np.cumsum([0, *map(len, new)])
            if offsets[-1]:
                self._drafter.append(names, np.concatenate(new).astype(np.int32), offsets)
        except Exception:
            self._lose(names)
            raise

    def _lose(self, names: list[str]) -> None:
        """A part of their text is lost: no drafts for them from now on, and nothing kept."""
        for name in names:
            self._behind.pop(name, None)
            if self._texts.pop(name, None) is not None:
                self._end(name, [])

    def _finish(self, names: set[str]) -> None:
        ended = sorted(names & self._texts.keys())
        try:
            self._tell([name for name in ended if name in self._behind])
        finally:
            for name in ended:
                if (text := self._texts.pop(name, None)) is not None:
                    # The text of a part is kept with the response's last part, which begins with it.
                    self._end(name, [] if is_continued(text) else response_of(text))

    def _end(self, name: str, response: list[int]) -> None:
        self._drafter.finish(name)
        if self.history:
            self.history.request_finished(name, response)
