"""Draft tokens that are thought to be too dear are verified now and then all the same.

Only steps with draft tokens tell what these cost. Without trials a table of step costs that says far too much, as one
measured on a busy machine may, would never be found out. A trial verifies what would pay at a fraction of the price,
and comes once the steps without drafts since the last one are so many that it loses a small share of their time.
"""

import numpy as np

from sam.switch.draft_tokens import choose_lengths

PRICE_SHARE = 1 / 8  # of the price thought, at which a draft token of a trial pays: a guess at how wrong tables are
LOSS_SHARE = 1 / 256  # of the time without drafts that a trial adds, if the price is as thought
MAX_LOSS = 4.0  # steps without drafts: a trial that would add more verifies fewer tokens


class PriceTrials:
    """Counts steps without drafts, and chooses the draft tokens of a trial."""

    def __init__(self):
        self._steps = 0  # without draft tokens, since the last with some

    @property
    def affordable(self) -> float:
        """What a trial may add now, in steps without drafts."""
        return min(LOSS_SHARE * self._steps, MAX_LOSS)

    def passed(self, steps: int) -> None:
        """So many steps have passed without draft tokens, as far as is known."""
        self._steps += steps

    def drafted(self) -> None:
        """Draft tokens are being verified."""
        self._steps = 0

    def floor(self, floor: float) -> float:
        """The acceptance below which drafts need not be made for the next step.

        Args:
            floor: that below which no draft token pays: the price of one for each request, in steps without drafts.
        """
        return PRICE_SHARE * floor if floor <= self.affordable or self.affordable == MAX_LOSS else floor

    def choose(
        self, acceptance: np.ndarray, offsets: np.ndarray, requests: int, cost: np.ndarray, min_gain: float
    ) -> tuple[np.ndarray, float]:
        """Choose a trial's draft tokens where none pay; the arguments are those of `choose_lengths`.

        Returns:
            int64 [drafts], tokens of each, all 0 if it is too early for a trial or none would pay at the lower price;
            and the draft tokens expected to be accepted.
        """
        cheap = cost[0] + PRICE_SHARE * (cost - cost[0])
        lengths, _, expected = choose_lengths(acceptance, offsets, requests, cheap, min_gain)
        most = int(np.searchsorted(cost, (1.0 + self.affordable) * cost[0], side="right")) - 1
        if lengths.sum() > most:
            most = most if self.affordable == MAX_LOSS else 0
            lengths, _, expected = choose_lengths(acceptance, offsets, requests, cheap[: most + 1], min_gain)
        if lengths.any():
            self.drafted()
        return lengths, expected
