"""The milliseconds that engine steps take beyond their table of costs, learnt from the steps themselves.

    fixed + requests x per_request + draft tokens x per_draft_token, and speculating (0 or more) with any draft token

No table of forward passes holds scheduling, drafting and sampling, and machines change. The terms are learnt by
Bayesian linear regression with exponential forgetting (Bishop, Pattern Recognition and Machine Learning, section 3.3;
Haykin, Adaptive Filter Theory, chapter 10): the table is the prior mean, and weighs the more the noisier the steps are.
With a prior of fixed weight a busy machine's noise would come out as a price of draft tokens: fewer would be verified,
and from few the price is learnt even worse. The noise is measured by a second regression without the table as its
prior, which a wrong table cannot mislead.
"""

from typing import NamedTuple

import numpy as np

from sam.jit import compiled
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


@compiled
def _solve(matrix, right):
    """x of matrix x = right, by elimination, which needs no pivots where a matrix is positive definite (Golub and Van
    Loan, Matrix Computations, section 4.2). numba's own solver needs scipy, and numpy's takes ten times as long."""
    a, x, size = matrix.copy(), right.copy(), right.size
    for i in range(size):
        for j in range(i + 1, size):
            factor = a[j, i] / a[i, i]
            a[j, i:] -= factor * a[i, i:]
            x[j] -= factor * x[i]
    for i in range(size - 1, -1, -1):
        for j in range(i + 1, size):
            x[i] -= a[i, j] * x[j]
        x[i] /= a[i, i]
    return x


# Plain tuples: numba takes ten microseconds more for NamedTuples that come from Python, half of what a decision takes.
@compiled
def _update(sums, prior, step, variance, forget):
    """Learn from a step.

    Args:
        sums: changed in place, by term: information (float64 [4, 4], weighted outer products of the features), target
            (float64 [4], weighted features x extra_ms), coefficients (float64 [4], the terms), and without_table
            (float64 [4], the terms of the regression without the table).
        prior: mean and std (float64 [4], milliseconds by term), the least variance of a step's noise, and the share of
            `per_request` that a draft token adds too.
        step: requests, draft tokens, and milliseconds beyond the table, as floats.
        variance: of the steps' noise, milliseconds squared.
        forget: weight of this step in the variance.

    Returns:
        The new variance.
    """
    information, target, coefficients, without_table = sums
    prior_mean, prior_std, min_variance, share = prior
    requests, drafted, extra_ms = step
    features = np.array([1.0, requests + share * drafted, drafted, 1.0 if drafted > 0 else 0.0])
    error = extra_ms
    for i in range(4):
        error -= features[i] * without_table[i]
    variance += (error**2 - variance) * forget
    keep = 1.0 - 1.0 / MEMORY_STEPS
    for i in range(4):
        target[i] = keep * target[i] + features[i] * extra_ms
        for j in range(4):
            information[i, j] = keep * information[i, j] + features[i] * features[j]
    with_table, without, right = information.copy(), information.copy(), target.copy()
    for i in range(4):
        weight = max(variance, min_variance) / prior_std[i] ** 2
        weight = min(weight, MAX_FIXED_PRIOR) if i == 0 else weight
        with_table[i, i] += weight
        without[i, i] += 1.0
        right[i] += weight * prior_mean[i]
    coefficients[:], without_table[:] = _solve(with_table, right), _solve(without, target)
    if coefficients[3] < 0.0:
        # Where every step has drafts the steps tell the sum of fixed and speculating, and not which is which: a table
        # that is far too high would come out as a reward of drafts, plain steps as slow, and all drafts be verified.
        with_table[3, :], with_table[:, 3], with_table[3, 3], right[3] = 0.0, 0.0, 1.0, 0.0
        coefficients[:] = _solve(with_table, right)
    coefficients[2] += share * coefficients[1]
    return variance


class Correction:
    """The milliseconds of a step beyond `step_cost`, learnt as the module says.

    Args:
        step_cost: the table.
        forward_only: whether it holds forward passes only, without sampling and drafting.
    """

    def __init__(self, step_cost: StepCost, forward_only: bool = False):
        cheapest = float(step_cost.milliseconds.min())
        mean = np.array([0.0, 0.0, 0.0, UNMEASURED_SPECULATING * cheapest * forward_only])
        share = UNMEASURED_PER_DRAFT_TOKEN * forward_only
        self._prior = mean, _prior_std(step_cost), (MIN_NOISE * cheapest) ** 2, share
        self._coefficients = mean.copy()
        self._sums = np.zeros((4, 4)), np.zeros(4), self._coefficients, np.zeros(4)
        self._variance, self._steps = 0.0, 0
        self._outliers: list[tuple[float, int, int, float]] = []

    @property
    def terms(self) -> CostTerms:
        """The learnt terms, in milliseconds."""
        return CostTerms(*self._coefficients.tolist())

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
        self._steps += 1
        # The first errors are of terms that were not learnt yet: they lose their weight sooner than in a mean.
        forget = max(2.0 / (self._steps + 1), 1.0 / MEMORY_STEPS)
        step = float(requests), float(drafted), milliseconds - table_ms
        self._variance = _update(self._sums, self._prior, step, self._variance, forget)
        return True

    def extra_ms(self, requests: int, drafted: float) -> float:
        """Milliseconds beyond the table of a step with `requests` requests and `drafted` draft tokens."""
        fixed, per_request, per_draft_token, speculating = self._coefficients.tolist()
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
