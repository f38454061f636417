"""How often a trained drafter's tokens are accepted, by position of the draft and by request.

A request's own share is taken to be that of all requests until its counts outweigh `PRIOR` of them (shrinkage, as in
sam.drafting.texts).
"""

import numpy as np

PRIOR = 8.0  # observations of a position that its share in all requests counts for, and the first guess there
FIRST_GUESS = 0.7  # share accepted before anything is known: high, so that the drafter is tried
FORGET = 1024.0  # observations after which a position's older half counts half
KEPT_OVER_SYNC = 0.1  # of the counts, when the target's weights change: the drafter is tried again


class PositionAcceptance:
    """Counts what was accepted of drafts of up to `num_speculative_tokens`."""

    def __init__(self, num_speculative_tokens: int):
        self.num_speculative_tokens = num_speculative_tokens
        self._all = np.zeros((2, num_speculative_tokens))  # observed, accepted
        self._own: dict[str, np.ndarray] = {}
        self.waiting: dict[str, tuple[int, list[int]]] = {}  # drafts to compare: the tokens before each, and its own

    @property
    def shares(self) -> np.ndarray:
        """float64 [positions], share accepted at each position of the drafts accepted up to there."""
        # Of little known, like the one before: else drafts longer than the longest so far would never be tried.
        shares = np.empty(self.num_speculative_tokens)
        before = FIRST_GUESS
        for i, (observed, accepted) in enumerate(self._all.T.tolist()):
            shares[i] = before = (accepted + PRIOR * before) / (observed + PRIOR)
        return shares

    def expected(self, request_ids) -> np.ndarray:
        """float64 [requests, positions], probability that a token and all before it are accepted."""
        shares = self.shares
        nothing = np.zeros_like(self._all)
        own = np.array([self._own.get(name, nothing) for name in request_ids]).reshape(-1, *nothing.shape)
        return np.cumprod((own[:, 1] + PRIOR * shares) / (own[:, 0] + PRIOR), axis=1)

    def drafted(self, request_id: str, length: int, tokens: list[int]) -> None:
        """Remember a draft for a text of `length` tokens, whether it is verified or not."""
        self.waiting[request_id] = length, tokens

    def compare(self, request_id: str, text) -> int:
        """Compare a request's last draft with its text; the number of its tokens that are in it."""
        length, tokens = self.waiting.pop(request_id)
        right = 0
        followed = text[length : length + len(tokens)]
        while right < len(followed) and tokens[right] == followed[right]:
            right += 1
        self.add(request_id, len(followed), right)
        return right

    def add(self, request_id: str, verified: int, right: int) -> None:
        """Count a draft of which the first `right` of `verified` tokens were accepted."""
        own = self._own.setdefault(request_id, np.zeros_like(self._all))
        for counts in (self._all, own):
            counts[0, : min(verified, right + 1)] += 1
            counts[1, :right] += 1
            counts[:, counts[0] >= FORGET] *= 0.5

    def keep_only(self, request_ids) -> None:
        """Forget all other requests."""
        for known in (self._own, self.waiting):
            for request_id in [name for name in known if name not in request_ids]:
                del known[request_id]

    def weights_updated(self) -> None:
        """The target has new weights: what was accepted under the old ones says little."""
        self._all *= KEPT_OVER_SYNC
        self._own.clear()
        self.waiting.clear()
