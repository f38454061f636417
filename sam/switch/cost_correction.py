"""The milliseconds that engine steps take beyond their table of costs, learnt from the steps themselves.

    fixed + requests x per_request + draft tokens x per_draft_token, and speculating (0 or more) with any draft token

No table of forward passes holds scheduling, drafting and sampling, and machines change. The terms are learnt by
Bayesian linear regression with exponential forgetting (Bishop, Pattern Recognition and Machine Learning, section 3.3;
Haykin, Adaptive Filter Theory, chapter 10): the table is the prior mean, and weighs the more the noisier the steps are.
With a prior of fixed weight a busy machine's noise would come out as a price of draft tokens: fewer would be verified,
and from few the price is learnt even worse. The noise is what no terms explain, whatever the prior: a wrong table is no
noise.
"""

from typing import NamedTuple

import numpy as np

from sam.switch.step_cost import StepCost

MEMORY_STEPS = 128.0  # steps after which a step has lost most of its weight
# Prior standard deviations: of what all steps share, the cheapest; of what a request adds, all that the table says;
# of a draft token, half of the most that it says for any number of requests; neither less than these shares of the
# cheapest step. Of a step with drafts, half of the cheapest step: scheduled asynchronously it alone waits for the host.
# The first weighs no more than so many steps: what all steps share must reach the fixed term soon, and not the tokens'
# price, however noisy the steps and however wrong the table.
FIXED_STD, PER_REQUEST_STD, PER_DRAFT_TOKEN_STD, SPECULATING_STD = 1.0, 1.0, 0.5, 0.5
MAX_FIXED_PRIOR = 1.0
MIN_PER_REQUEST_STD, MIN_PER_DRAFT_TOKEN_STD = 0.01, 0.001
# Share of the cheapest step that drafting and verifying take, whatever is drafted, where the table holds forward passes
# only: a guess. Without it an engine that drafts in every step never learns that this costs anything.
UNMEASURED_SPECULATING = 0.05
# Share of what a request adds to such a table that a draft token is taken to add, since it is attended from and sampled
# from as well: a guess.
UNMEASURED_PER_DRAFT_TOKEN = 0.5
MIN_NOISE = 0.01  # share of the cheapest step: steps that never differ tell nothing about terms they have not shown
OUTLIER = 4.0  # times the expected milliseconds: such a step was held up by something else and is not learnt from
MAX_OUTLIERS = 8  # in a row: then the shortest of them is learnt from


class CostTerms(NamedTuple):
    """Milliseconds beyond the table: of every step, of each request, of each draft token, of a step with drafts (the
    last not negative)."""

    fixed: float
    per_request: float
    per_draft_token: float
    speculating: float


class Correction:
    """The milliseconds of a step beyond `step_cost`, learnt as the module says.

    Args:
        step_cost: the table.
        forward_only: whether it holds forward passes only, without sampling and drafting.

    Attributes:
        terms: the learnt terms, in milliseconds.
    """

    def __init__(self, step_cost: StepCost, forward_only: bool = False):
        cheapest = float(step_cost.milliseconds.min())
        self._mean = np.array([0.0, 0.0, 0.0, UNMEASURED_SPECULATING * cheapest * forward_only])
        self._std, self._min_variance = _prior_std(step_cost), (MIN_NOISE * cheapest) ** 2
        self._share = UNMEASURED_PER_DRAFT_TOKEN * forward_only  # of `per_request`, that a draft token adds too
        self.terms = CostTerms(*self._mean.tolist())
        # Weighted sums over the steps, of products of the four features and the milliseconds beyond the table.
        self._sums = np.zeros((5, 5))
        self._outliers: list[tuple[float, int, int, float]] = []

    def observe(self, requests: int, drafted: int, table_ms: float, milliseconds: float) -> bool:
        """Learn from a step that took `milliseconds` where the table says `table_ms`.

        Returns:
            False if the step is an outlier, held up by something else.
        """
        expected = max(0.0, table_ms + self.extra_ms(requests, drafted))
        if milliseconds > OUTLIER * max(expected, 1e-3):
            self._outliers.append((milliseconds, requests, drafted, table_ms))
            if len(self._outliers) < MAX_OUTLIERS:
                return False
            milliseconds, requests, drafted, table_ms = min(self._outliers)
        self._outliers.clear()
        step = np.array([1.0, requests + self._share * drafted, drafted, drafted > 0, milliseconds - table_ms])
        self._sums = (1.0 - 1.0 / MEMORY_STEPS) * self._sums + np.outer(step, step)
        self.terms = self._fit()
        return True

    def _fit(self) -> CostTerms:
        information, target, squares = self._sums[:4, :4], self._sums[:4, 4], self._sums[4, 4]
        steps = self._sums[0, 0]
        unexplained = squares - target @ np.linalg.solve(information + np.eye(4), target)
        weights = max(unexplained / steps, self._min_variance) / self._std**2
        weights[0] = min(weights[0], MAX_FIXED_PRIOR)
        matrix, right = information + np.diag(weights), target + weights * self._mean
        terms = np.linalg.solve(matrix, right)
        if terms[3] < 0.0:
            # Where every step has drafts the steps tell the sum of fixed and speculating, and not which is which: a
            # table that is far too high would come out as a reward of drafts, plain steps as slow, and all drafts be
            # verified.
            terms = np.append(np.linalg.solve(matrix[:3, :3], right[:3]), 0.0)
        terms[2] += self._share * terms[1]
        return CostTerms(*terms.tolist())

    def extra_ms(self, requests: int, drafted: float) -> float:
        """Milliseconds beyond the table of a step with `requests` requests and `drafted` draft tokens."""
        fixed, per_request, per_draft_token, speculating = self.terms
        return fixed + per_request * requests + per_draft_token * drafted + (speculating if drafted else 0.0)


def _prior_std(step_cost: StepCost) -> np.ndarray:
    """float64 [4]: prior standard deviations of the terms, in milliseconds."""
    cells, requests, tokens = step_cost.milliseconds, step_cost.requests, step_cost.tokens_per_request
    cheapest, std = cells.min(), np.ones(4)
    per_request = (cells[-1, 0] - cells[0, 0]).mean() / max(1, requests[-1] - requests[0])
    spans = np.maximum(1, requests * (tokens[-1] - tokens[0]))
    per_token = ((cells[:, -1] - cells[:, 0]).mean(axis=1) / spans).max()
    std[0] = FIXED_STD * cheapest
    std[1] = PER_REQUEST_STD * per_request + MIN_PER_REQUEST_STD * cheapest
    std[2] = PER_DRAFT_TOKEN_STD * per_token + MIN_PER_DRAFT_TOKEN_STD * cheapest
    std[3] = SPECULATING_STD * cheapest
    return std
