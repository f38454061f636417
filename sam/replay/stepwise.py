"""Drafters that take one request at a time, behind the interface of sam.drafting.drafter.Drafter."""

import numpy as np

from sam.drafting.drafts import Drafts


class StepwiseDrafter:
    """Gives drafters that take one request at a time the interface of sam.drafting.drafter.Drafter.

    A subclass has `propose(request_id, text, budget)`: up to `budget` tokens to follow a text (int32 [length]).
    """

    nbytes = 0

    def __init__(self):
        self._texts: dict[str, tuple[np.ndarray, int]] = {}  # a buffer, and how much of it is used

    def start(self, request_id: str, prompt: np.ndarray, policy_version: int = 0) -> None:
        """Start to follow a request, whatever the version of the weights."""
        self._texts[request_id] = np.array(prompt, dtype=np.int32), len(prompt)

    def append(self, request_ids, token_ids, offsets) -> None:
        """Show the drafter the requests' new tokens."""
        for row, request_id in enumerate(request_ids):
            self.add(request_id, token_ids[offsets[row] : offsets[row + 1]])

    def add(self, request_id: str, tokens: np.ndarray) -> None:
        """Append a request's new tokens."""
        buffer, used = self._texts[request_id]
        if used + len(tokens) > len(buffer):
            buffer = np.concatenate([buffer[:used], np.empty(used + len(tokens) + 1024, np.int32)])
        buffer[used : used + len(tokens)] = tokens
        self._texts[request_id] = buffer, used + len(tokens)

    def draft(self, request_ids, budgets) -> Drafts:
        """Draft up to budgets[i] tokens for request i."""
        drafts = []
        for request_id, budget in zip(request_ids, budgets.tolist(), strict=True):
            buffer, used = self._texts[request_id]
            drafts.append(np.asarray(self.propose(request_id, buffer[:used], budget), dtype=np.int32))
        bounds = np.concatenate([[0], np.cumsum([len(draft) for draft in drafts])])
        flat = np.concatenate(drafts) if drafts else np.empty(0, np.int32)
        return Drafts(flat, bounds, np.ones(len(flat), np.float32), np.zeros(len(drafts), np.int32))

    def finish(self, request_id: str) -> None:
        """Forget a request."""
        del self._texts[request_id]
