"""Which requests of a model runner the drafter follows, and the tokens that it lacks."""

import itertools
import logging
from typing import Any

import numpy as np

from sam.drafting.drafter import Drafter
from sam.history.client import HistoryClient
from sam.vllm.runner_hooks import is_continued, response_of, response_start

logger = logging.getLogger(__name__)


def is_token(token_id: int) -> bool:
    """Whether it is one, not a placeholder of a token that the host does not know yet."""
    return token_id >= 0


class TrackedRequests:
    """Starts and finishes requests in the drafter, and in the history where there is one.

    Args:
        runner: vLLM's model runner.
        history: told of each request's prompt and response.
        counters: tracked_requests, untracked_requests and policy_version.

    Attributes:
        states: vLLM's state of each tracked request. vLLM forgets a finished request before the drafter may have seen
            its last tokens: its state is kept here.
        untracked: requests that get no drafts.
    """

    def __init__(self, runner, drafter: Drafter, history: HistoryClient | None, counters: dict[str, int]):
        self._runner, self._drafter, self._history, self._counters = runner, drafter, history, counters
        self.states: dict[str, Any] = {}
        self.untracked: set[str] = set()

    def batch(self, emitted: list[int], num_tokens_no_spec, token_ids_cpu) -> tuple[list[int], list[str], tuple]:
        """Rows that can be drafted for, their request ids, and the tokens and offsets that the drafter lacks."""
        self.release_finished()
        request_ids = self._runner.input_batch.req_ids
        sampled = [row for row, tokens in enumerate(emitted) if tokens]
        rows = [r for r in sampled if request_ids[r] in self.states or self._track(r, request_ids[r], token_ids_cpu)]
        ids = [request_ids[row] for row in rows]
        return rows, ids, self._new_tokens(rows, ids, num_tokens_no_spec, token_ids_cpu) if rows else ()

    def _track(self, row: int, request_id: str, token_ids_cpu) -> bool:
        """Track the request of a row from now on; False if its prompt cannot be tracked."""
        if request_id in self.untracked:
            return False
        state = self._runner.requests[request_id]
        prompt = token_ids_cpu[row, : response_start(state)]
        try:
            if self._history:
                self._history.request_started(request_id, prompt, self._drafter)
            self._drafter.start(request_id, prompt, self._counters["policy_version"])
        except ValueError as error:
            if self._counters["untracked_requests"] == 0:
                logger.warning("no drafts for a request: %s (logged once, then counted)", error)
            self._counters["untracked_requests"] += 1
            self.untracked.add(request_id)
            if self._history:
                self._history.request_finished(request_id, [])
            return False
        self.states[request_id] = state
        self._counters["tracked_requests"] += 1
        return True

    def _new_tokens(self, rows, ids, num_tokens_no_spec, token_ids_cpu) -> tuple[np.ndarray, np.ndarray]:
        """Tokens the drafter has not seen: this step's, or more after a preemption or a step it missed."""
        known, ends = self._drafter.lengths(ids), num_tokens_no_spec[rows]
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(np.maximum(ends - known, 0), out=offsets[1:])
        spans = zip(rows, known.tolist(), ends.tolist(), strict=True)
        pieces = [token_ids_cpu[row, start:end] for row, start, end in spans]
        return np.concatenate(pieces).astype(np.int32, copy=False), offsets

    def release_finished(self) -> None:
        """Preempted requests leave the batch but stay in `runner.requests`; finished and aborted leave both."""
        for request_id in [name for name in self.states if name not in self._runner.requests]:
            state = self.states.pop(request_id)
            response = response_of(state)
            unseen = self._drafter.num_tokens(request_id) - response_start(state)
            # Under asynchronous scheduling an aborted request may end in placeholders, which are negative.
            if last := list(itertools.takewhile(is_token, response[unseen:])):
                self._drafter.append([request_id], np.array(last, dtype=np.int32), np.array([0, len(last)]))
            # The text of a part is kept with the response's last part, which begins with it.
            self._finish(request_id, [] if is_continued(state) else response)
        self.untracked.intersection_update(self._runner.requests)

    def stop(self, request_ids: list[str]) -> None:
        """No drafts for requests of whose text a part is missing, and nothing kept of them."""
        for request_id in request_ids:
            if self.states.pop(request_id, None) is not None:
                self._finish(request_id, [])
            self.untracked.add(request_id)

    def _finish(self, request_id: str, response: list[int]) -> None:
        """Let drafter and history know that a request's text has ended; without a response nothing is kept."""
        self._drafter.finish(request_id)
        if self._history:
            self._history.request_finished(request_id, response)
