"""The requests of a model runner that the drafter follows, and the tokens that it is given."""

import itertools
import logging
import math
from typing import Any, NamedTuple

import numpy as np

from sam.drafting.drafter import Drafter
from sam.history.client import HistoryClient
from sam.sharing.client import INTERVAL_SECONDS
from sam.vllm.hints import is_continued, response_of, response_start

logger = logging.getLogger(__name__)

# Steps without drafts after which the drafter is given the tokens of all of them at once.
MAX_STEPS_BEHIND = 32


class TrackedBatch(NamedTuple):
    """The rows of a step that can be drafted for."""

    rows: list[int]  # of the model runner's batch
    ids: list[str]  # their requests
    lengths: np.ndarray  # int [rows], tokens of each text that the host knows
    texts: np.ndarray  # int32 [batch, max_model_len], those of the whole batch


def start_request(
    drafter: Drafter,
    history: HistoryClient | None,
    counters: dict[str, int],
    request_id: str,
    prompt: np.ndarray,
    given: np.ndarray,
) -> bool:
    """Follow a request with `prompt`, which goes on with `given` (both int32 [length]); False if it cannot be."""
    try:
        if history:
            history.request_started(request_id, prompt, drafter)
        drafter.start(request_id, prompt, given)
    except ValueError as error:
        if counters["untracked_requests"] == 0:
            logger.warning("no drafts for a request: %s (logged once, then counted)", error)
        counters["untracked_requests"] += 1
        if history:
            history.request_finished(request_id, [])
        return False
    counters["tracked_requests"] += 1
    return True


class TrackedRequests:
    """Starts, updates and finishes a model runner's requests in the drafter, and in the history if there is one."""

    def __init__(self, runner, drafter: Drafter, history: HistoryClient | None, counters: dict[str, int]):
        self._runner, self._drafter, self.history, self._counters = runner, drafter, history, counters
        # vLLM forgets a finished request before the drafter may have seen its last tokens: its state is kept here.
        self.states: dict[str, Any] = {}
        self.untracked: set[str] = set()  # requests that get no drafts
        self.shares_at = math.inf  # seconds from which on new text is to be sent to other replicas
        self._steps_behind = 0  # since the last update

    def is_due(self, now: float) -> bool:
        """Whether a step without drafts, at `now` seconds, updates the drafter too. To be asked once a step."""
        self._steps_behind += 1
        return self._steps_behind >= MAX_STEPS_BEHIND or now >= self.shares_at

    def update(self, now: float, emitted: list[int], lengths: np.ndarray, texts: np.ndarray) -> TrackedBatch | None:
        """Follow the batch's requests, finish those that are gone, and append new tokens.

        Args:
            emitted: tokens that each row's step brought; 0 in its prompt.
            lengths: int [rows], tokens of each text (int32 [rows, max_model_len]) that the host knows.

        Returns:
            The rows to draft for; None without any.
        """
        self._steps_behind = 0
        if self.shares_at < math.inf:
            self.shares_at = now + INTERVAL_SECONDS
        self.release_finished()
        if self.history:
            self.history.deliver(self._drafter)
        request_ids = self._runner.input_batch.req_ids
        sampled = [row for row, tokens in enumerate(emitted) if tokens]
        rows = [r for r in sampled if request_ids[r] in self.states or self._track(r, request_ids[r], texts)]
        if not rows:
            return None
        ids = [request_ids[row] for row in rows]
        # This step's tokens, or more after a preemption or steps in which the drafter was not called.
        known, ends = self._drafter.lengths(ids), lengths[rows]
        offsets = np.concatenate([[0], np.cumsum(np.maximum(ends - known, 0))])
        spans = zip(rows, known.tolist(), ends.tolist(), strict=True)
        new = np.concatenate([texts[row, start:end] for row, start, end in spans]).astype(np.int32, copy=False)
        self._drafter.append(ids, new, offsets)
        return TrackedBatch(rows, ids, ends, texts)

    def _track(self, row: int, request_id: str, texts: np.ndarray) -> bool:
        """Track the request of a row from now on; False if its prompt cannot be tracked."""
        if request_id in self.untracked:
            return False
        state = self._runner.requests[request_id]
        prompt, given, _ = np.split(texts[row], [response_start(state), state.num_prompt_tokens])
        if not start_request(self._drafter, self.history, self._counters, request_id, prompt, given):
            self.untracked.add(request_id)
            return False
        self.states[request_id] = state
        return True

    def release_finished(self) -> None:
        """Preempted requests leave the batch but stay in `runner.requests`; finished and aborted leave both."""
        for request_id in [name for name in self.states if name not in self._runner.requests]:
            state = self.states.pop(request_id)
            # Under asynchronous scheduling an aborted request may end in placeholders.
            response = list(itertools.takewhile(lambda token: token >= 0, response_of(state)))
            unseen = self._drafter.num_tokens(request_id) - response_start(state)
            if last := response[unseen:]:
                self._drafter.append([request_id], np.array(last, dtype=np.int32), np.array([0, len(last)]))
            self._drafter.finish(request_id)
            if self.history:
                # The text of a part is kept with the response's last part, which begins with it.
                self.history.request_finished(request_id, [] if is_continued(state) else response)
        self.untracked.intersection_update(self._runner.requests)
