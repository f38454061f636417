"""The text of an engine's requests as the host learns it: prompts when they are scheduled, tokens from the copies that
the runner makes for the scheduler."""

import logging
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from sam.drafting.drafter import Drafter

logger = logging.getLogger(__name__)

COUNTERS = ("tracked_requests", "untracked_requests", "policy_version")


class Step(NamedTuple):
    """What a step brought, as far as it has come to the host.

    Attributes:
        request_ids: of its rows.
        tokens: int64 [rows, 1 + k], on the host once `copied`.
        counts: int32 [rows], tokens of each row that are kept; 0 for a row still in its prompt.
        copied: event of the copies of both.
    """

    request_ids: list[str]
    tokens: np.ndarray
    counts: np.ndarray
    copied: Any


class New(NamedTuple):
    """A request that comes, or comes back after a preemption: its tokens so far, of which the prompt's are first."""

    request_id: str
    token_ids: list[int]
    prompt_length: int


class FollowedRequests:
    """Tells the drafter in order what has happened, when it is asked to.

    Args:
        counters: those of COUNTERS.
    """

    def __init__(self, drafter: Drafter, counters: dict[str, int]):
        self._drafter, self._counters = drafter, counters
        self._lengths: dict[str, int] = {}  # tokens of each followed request, whether the drafter has them or not
        self._unread: deque[Step | New | set[str]] = deque()

    def schedule(self, scheduler_output) -> None:
        """Note which requests have finished and which are new; a preempted one stays, and comes back as new."""
        if scheduler_output.finished_req_ids:
            self._unread.append(set(scheduler_output.finished_req_ids))
        for request in scheduler_output.scheduled_new_reqs:
            # vLLM's own before it serves: _warmup_0_, _v2_mixed_warmup_decode_.
            if request.prefill_token_ids and not (request.req_id[0] == "_" and "warmup_" in request.req_id):
                self._unread.append(New(request.req_id, request.prefill_token_ids, request.prompt_len))

    def end_step(self, step: Step) -> None:
        """Note what a step brings; its copies need not have ended."""
        self._unread.append(step)

    def read(self, except_steps: int = 0) -> None:
        """Tell the drafter what has happened, waiting for the tokens of steps under way.

        Args:
            except_steps: last steps that are left for the next call.
        """
        steps = sum(isinstance(one, Step) for one in self._unread)
        while self._unread and not (isinstance(self._unread[0], Step) and steps <= except_steps):
            match self._unread.popleft():  # whatever fails in the drafter fails once
                case Step() as step:
                    steps -= 1
                    step.copied.synchronize()
                    self._append(step)
                case New() as request:
                    self._follow(request)
                case finished:
                    self._finish(finished)

    def rows_of(self, step: Step) -> list[int]:
        """Rows that can be drafted for."""
        return [
            row
            for row, count in enumerate(step.counts.tolist())
            if count and self._lengths.get(step.request_ids[row], -1) >= 0
        ]

    def lengths(self, request_ids: list[str]) -> np.ndarray:
        """int64 [requests], tokens of each."""
        return np.array([self._lengths[name] for name in request_ids], dtype=np.int64)

    def _follow(self, request: New) -> None:
        name, prompt_length = request.request_id, request.prompt_length
        token_ids = np.asarray(request.token_ids, dtype=np.int32)
        if name not in self._lengths:
            try:
                self._drafter.start(name, token_ids[:prompt_length], self._counters["policy_version"])
            except ValueError as error:
                if self._counters["untracked_requests"] == 0:
                    logger.warning("no drafts for a request: %s (logged once, then counted)", error)
                self._counters["untracked_requests"] += 1
                return
            self._counters["tracked_requests"] += 1
        self._lengths[name] = len(token_ids)
        known = self._drafter.num_tokens(name)
        if known < len(token_ids):
            rest = token_ids[known:]
            self._drafter.append([name], rest, np.array([0, len(rest)]))

    def _append(self, step: Step) -> None:
        rows = self.rows_of(step)
        if not rows:
            return
        ids = [step.request_ids[row] for row in rows]
        begins, known = self.lengths(ids), self._drafter.lengths(ids)
        counts = step.counts[rows]
        self._lengths.update(zip(ids, (begins + counts).tolist(), strict=True))
        # After a preemption tokens may come twice: they are the same.
        skipped = np.clip(known - begins, 0, counts)
        pieces = [step.tokens[row, skip:count] for row, skip, count in zip(rows, skipped, counts, strict=True)]
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(counts - skipped, out=offsets[1:])
        if (known < begins).any():
            # A fault lost a part of their text.
            self._finish({name for name, is_behind in zip(ids, known < begins, strict=True) if is_behind})
            kept = [place for place, name in enumerate(ids) if name in self._lengths]
            ids, pieces = [ids[place] for place in kept], [pieces[place] for place in kept]
            offsets = np.cumsum([0, *map(len, pieces)])
        if ids:
            self._drafter.append(ids, np.concatenate(pieces).astype(np.int32), offsets)

    def _finish(self, request_ids: set[str]) -> None:
        for name in sorted(request_ids & self._lengths.keys()):
            del self._lengths[name]
            self._drafter.finish(name)
