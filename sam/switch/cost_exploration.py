"""Verify draft tokens now and then that are thought to be too expensive, to learn what they cost.

Only steps with draft tokens tell that. Without exploration a table of step costs that says far too much, as one
measured on a busy machine may, would never be found out. An exploring step verifies what would pay at a fraction of the
cost, and comes once the steps without drafts since the last one are so many that it loses a small share of their time.
"""

import numpy as np

from sam.switch.draft_tokens import choose_lengths

COST_SHARE = 1 / 8  # of the cost thought, at which a draft token is worth exploring: a guess at how wrong tables are
LOSS_SHARE = 1 / 256  # of the time without drafts that exploring adds, if the cost is as thought
MAX_LOSS = 4.0  # steps without drafts: an exploring step that would add more verifies fewer tokens


class CostExploration:
    """Count steps without drafts, and choose the draft tokens of an exploring step."""

    def __init__(self):
        self._steps = 0  # without draft tokens, since the last with some

    @property
    def affordable(self) -> float:
        """What an exploring step may add now, in steps without drafts."""
        return min(LOSS_SHARE * self._steps, MAX_LOSS)

    def count_plain(self, steps: int) -> None:
        """Count steps without draft tokens, as far as is known."""
        self._steps += steps

    def reset(self) -> None:
        """Begin to count anew: draft tokens are being verified."""
        self._steps = 0

    def min_acceptance(self, floor: float) -> float:
        """Return the acceptance below which drafts need not be made for the next step.

        Args:
            floor: that below which no draft token pays: the cost of one for each request, in steps without drafts.
        """
        return COST_SHARE * floor if floor <= self.affordable or self.affordable == MAX_LOSS else floor

    def choose(
        self, acceptance: np.ndarray, offsets: np.ndarray, requests: int, cost: np.ndarray, min_gain: float
    ) -> tuple[np.ndarray, float]:
        """Choose the draft tokens of an exploring step where none pay; the arguments are those of `choose_lengths`.

        Returns:
            int64 [drafts], tokens of each, all 0 if it is too early to explore or none would pay at the lower cost;
            and the draft tokens expected to be accepted.
        """
        cheap = cost[0] + COST_SHARE * (cost - cost[0])
        lengths, _, expected = choose_lengths(acceptance, offsets, requests, cheap, min_gain)
        most = int(np.searchsorted(cost, (1.0 + self.affordable) * cost[0], side="right")) - 1
        if lengths.sum() > most:
            most = most if self.affordable == MAX_LOSS else 0
            lengths, _, expected = choose_lengths(acceptance, offsets, requests, cheap[: most + 1], min_gain)
        if lengths.any():
            self.reset()
        return lengths, expected
