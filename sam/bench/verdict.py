"""Go or no-go: what the ratios of a few rounds say about a load."""

import math
from dataclasses import dataclass

import numpy as np

WORTHWHILE = 1.02  # ratio to stock from which speculation pays; less is not worth a setting
FEWEST_ROUNDS = 3  # a range of fewer says nothing about noise
MORE_ROUNDS = 3
GO, NO_GO, NOISY = "go", "no-go", "too noisy to tell"


def median_interval(values: list[float]) -> list[float]:
    """Median, and the narrowest two values around it between which the true median lies with 95 %: the range, up to
    eight values (order statistics: Conover, Practical Nonparametric Statistics, chapter 3.2)."""
    count, outside, beyond = len(values), 0, 0.0
    while (beyond := beyond + math.comb(count, outside) / 2**count) <= 0.025:
        outside += 1
    ordered, outside = sorted(values), max(0, outside - 1)
    return [round(float(v), 3) for v in (np.median(values), ordered[outside], ordered[count - 1 - outside])]


@dataclass(frozen=True)
class Verdict:
    """An answer about one load.

    Attributes:
        answer: GO, NO_GO or NOISY.
        ratio: median over the rounds of the reference's seconds over sam's; above 1 sam is faster.
        low, high: where the true median lies, by `median_interval`.
        rounds: rounds that this is of.
    """

    answer: str
    ratio: float
    low: float
    high: float
    rounds: int

    def line(self, requests: int) -> str:
        """The answer for a reader, in one line."""
        if self.answer != NOISY:
            return f"{self.answer}: {self.ratio:.2f}x ({self.low:.2f}-{self.high:.2f}) at {in_requests(requests)}"
        more = max(MORE_ROUNDS, FEWEST_ROUNDS - self.rounds)
        return (
            f"{NOISY}: {self.low:.2f}x-{self.high:.2f}x at {in_requests(requests)}, {more} more rounds "
            f"(--rounds {self.rounds + more} --resume)"
        )


def decide(ratios: list[float]) -> Verdict:
    """Go if the whole interval lies above WORTHWHILE, no-go if none of it does, otherwise too noisy to tell.

    Args:
        ratios: one for each round, the reference's seconds over sam's in that round; one or more.

    Example:
        >>> decide([1.31, 1.38, 1.44]).line(requests=4)
        'go: 1.38x (1.31-1.44) at 4 requests'
        >>> decide([0.95, 0.97, 1.01]).line(requests=24)
        'no-go: 0.97x (0.95-1.01) at 24 requests'
        >>> decide([0.9, 1.2, 1.1]).line(requests=1)
        'too noisy to tell: 0.90x-1.20x at 1 request, 3 more rounds (--rounds 6 --resume)'
    """
    ratio, low, high = median_interval(ratios)
    answer = NOISY
    if len(ratios) >= FEWEST_ROUNDS and low > WORTHWHILE:
        answer = GO
    elif len(ratios) >= FEWEST_ROUNDS and high <= WORTHWHILE:
        answer = NO_GO
    return Verdict(answer, ratio, low, high, len(ratios))


def in_requests(count: int) -> str:
    """A load in words."""
    return "1 request" if count == 1 else f"{count} requests"
