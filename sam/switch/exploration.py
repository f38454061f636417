"""Verify draft tokens now and then that are thought too expensive, and now and then none: to learn what they cost.

Only steps with draft tokens tell what these cost. Without exploration a table of step costs that says far too much, as
one measured on a busy machine may, would never be found out. An exploring step verifies what would pay at a fraction of
the cost, and comes once the steps without drafts since the last one are so many that it loses a small share of their
time. Where every step has drafts nothing tells what one without would take: scheduled asynchronously it waits for
nobody.
"""

import numpy as np

from sam.switch.draft_tokens import choose_lengths

COST_SHARE = 1 / 8  # of the cost thought, at which a draft token is worth exploring: a guess at how wrong tables are
LOSS_SHARE = 1 / 256  # of the time without drafts that exploring adds, if the cost is as thought
MAX_LOSS = 4.0  # steps without drafts: an exploring step that would add more verifies fewer tokens
# After so many steps with drafts, fewer at the start, some without are observed.
FIRST_DRAFTED_STEPS, DRAFTED_STEPS, PLAIN_STEPS = 8, 96, 3


class CostExploration:
    """Counts steps with and without draft tokens, and chooses the draft tokens of an exploring step.

    Attributes:
        is_exploring: whether the last choice was one.
    """

    def __init__(self):
        self.is_exploring = False
        self._plain = 0  # steps without draft tokens since the last with some, as far as is known
        self._drafted = DRAFTED_STEPS - FIRST_DRAFTED_STEPS  # in a row

    def count_plain(self, steps: int) -> None:
        """Count steps without draft tokens."""
        self._plain += steps

    def count_drafted(self) -> None:
        """Count a step with draft tokens that are thought to pay."""
        self.is_exploring, self._plain = False, 0
        self._drafted += 1

    def wants_plain_step(self) -> bool:
        """Whether the next step is to have no draft tokens, as one of PLAIN_STEPS."""
        if self._drafted < DRAFTED_STEPS:
            return False
        self._drafted += 1
        if self._drafted <= DRAFTED_STEPS + PLAIN_STEPS:
            return True
        self._drafted = 0
        return False

    def wanted(self, drafted: int) -> bool:
        """Whether a finished step with so many draft tokens was one to learn from."""
        return self.is_exploring if drafted else self._drafted > DRAFTED_STEPS

    @property
    def _affordable(self) -> float:
        """What an exploring step may add now, in steps without drafts."""
        return min(LOSS_SHARE * self._plain, MAX_LOSS)

    def min_acceptance(self, floor: float) -> float:
        """Return the acceptance below which drafts need not be made for the next step.

        Args:
            floor: that below which no draft token pays: the cost of one for each request, in steps without drafts.
        """
        return COST_SHARE * floor if min(floor, MAX_LOSS) <= self._affordable else floor

    def choose(
        self, acceptance: np.ndarray, offsets: np.ndarray, requests: int, cost: np.ndarray, min_gain: float
    ) -> tuple[np.ndarray, float]:
        """Choose the draft tokens of an exploring step where none pay; the arguments are those of `choose_lengths`.

        Returns:
            int64 [drafts], tokens of each, all 0 if it is too early to explore or none would pay at the lower cost;
            and the draft tokens expected to be accepted.
        """
        self._drafted = 0
        most = int(np.searchsorted(cost, (1.0 + MAX_LOSS) * cost[0], side="right"))
        cheap = cost[0] + COST_SHARE * (cost[:most] - cost[0])
        lengths, _, expected = choose_lengths(acceptance, offsets, requests, cheap, min_gain)
        self.is_exploring = bool(lengths.any()) and cost[lengths.sum()] <= (1.0 + self._affordable) * cost[0]
        if not self.is_exploring:
            return np.zeros_like(lengths), 0.0
        self._plain = 0
        return lengths, expected
