"""The requests of a model runner that the drafter follows, and the tokens that it is given."""

import itertools
from typing import Any, NamedTuple

import numpy as np

from sam.engine.hints import is_continued, response_of, response_start
from sam.engine.session import MAX_STEPS_BEHIND, Session


class TrackedBatch(NamedTuple):
    """The rows of a step that can be drafted for."""

    rows: list[int]  # of the model runner's batch
    ids: list[str]  # their requests
    lengths: np.ndarray  # int [rows], tokens of each text that the host knows
    texts: np.ndarray  # int32 [batch, max_model_len], those of the whole batch


class TrackedRequests:
    """Starts, updates and finishes a model runner's requests in the drafter, and in the history if there is one."""

    def __init__(self, runner, session: Session):
        self._runner = runner
        self._session = session
        self._drafter = session.drafter
        # vLLM forgets a finished request before the drafter may have seen its last tokens: its state is kept here.
        self.states: dict[str, Any] = {}
        self.untracked: set[str] = set()  # requests that get no drafts
        self._steps_behind = 0  # since the last update

    def is_due(self, now: float) -> bool:
        """Whether a step without drafts, at `now` seconds, updates the drafter too. To be asked once a step."""
        self._steps_behind += 1
        return self._steps_behind >= MAX_STEPS_BEHIND or now >= self._session.shares_at

    def update(self, now: float, emitted: list[int], lengths: np.ndarray, texts: np.ndarray) -> TrackedBatch | None:
        """Follow the batch's requests, finish those that are gone, and append new tokens.

        Args:
            emitted: tokens that each row's step brought; 0 in its prompt.
            lengths: int [rows], tokens of each text (int32 [rows, max_model_len]) that the host knows.

        Returns:
            The rows to draft for; None without any.
        """
        self._steps_behind = 0
        self.release_finished()
        self._session.deliver(now)
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
        if not self._session.start_request(request_id, prompt, given):
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
            # The text of a part is kept with the response's last part, which begins with it.
            self._session.end_request(request_id, [] if is_continued(state) else response)
        self.untracked.intersection_update(self._runner.requests)
