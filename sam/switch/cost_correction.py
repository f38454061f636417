"""What engine steps take beyond their table of costs, learnt from the steps themselves.

    fixed + requests x a + draft tokens x b, and c more with any draft token

since scheduling, drafting and sampling are in no table of forward passes, and machines change. Bayesian linear
regression with exponential forgetting (Bishop, Pattern Recognition and Machine Learning, section 3.3; Haykin, Adaptive
Filter Theory, chapter 10): the table is the prior, and counts for the more the noisier steps are. With a fixed prior a
busy machine's noise comes out as a price of draft tokens: fewer are verified then, and from these few the price is told
even worse. How noisy steps are is told by a regression without the table, which a wrong table cannot mislead.
"""

from __future__ import annotations

import numpy as np

from sam.jit import compiled
from sam.switch.step_cost import StepCost

MEMORY_STEPS = 128.0  # over which a step that was learnt from loses most of its weight
FIXED_PRIOR = 1.0  # steps: what all take alike goes to the fixed term at once, and not to a price of tokens
# How far the table may be off: what a request adds by all of it, what a token adds by half, and neither by less than
# these shares of the cheapest step; a step with any drafts by a tenth of the cheapest step.
REQUEST_DOUBT, TOKEN_DOUBT, SPECULATING_DOUBT = 1.0, 0.5, 0.1
LEAST_REQUEST_DOUBT, LEAST_TOKEN_DOUBT = 0.01, 0.001
# Share of the cheapest step that drafting and verifying take, whatever is drafted, where the table is of forward passes
# only: a guess. Without it an engine that drafts in every step never learns that this costs anything.
UNMEASURED_SHARE = 0.05
# Share of what a request adds to such a table that a draft token is taken to add, since it is attended from and sampled
# from as well: a guess.
UNMEASURED_ALIKE = 0.5
LEAST_NOISE = 0.01  # share of the cheapest step: steps that never differ say nothing of terms they have not shown
LARGEST_SURPRISE = 4.0  # times the expected milliseconds: a step that something else held up teaches nothing
SURPRISES_BELIEVED = 8  # of so many in a row the shortest is the truth


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


@compiled
def _learn(state, belief, step, variance, forget):
    """Change `state` by a step: its requests, draft tokens, and milliseconds beyond the table; returns the variance."""
    information, target, coefficients, without_table = state
    doubt, believed, least_variance, alike = belief
    requests, drafted, difference = step
    seen = np.array([1.0, requests + alike * drafted, drafted, 1.0 if drafted > 0 else 0.0])
    error = difference
    for i in range(4):
        error -= seen[i] * without_table[i]
    variance += (error**2 - variance) * forget
    keep = 1.0 - 1.0 / MEMORY_STEPS
    for i in range(4):
        target[i] = keep * target[i] + seen[i] * difference
        for j in range(4):
            information[i, j] = keep * information[i, j] + seen[i] * seen[j]
    with_table, without, right = information.copy(), information.copy(), target.copy()
    for i in range(4):
        prior = FIXED_PRIOR if i == 0 else max(variance, least_variance) / doubt[i] ** 2
        with_table[i, i] += prior
        without[i, i] += 1.0
        right[i] += prior * believed[i]
    coefficients[:], without_table[:] = _solve(with_table, right), _solve(without, target)
    coefficients[2] += alike * coefficients[1]
    return variance


class Correction:
    """Milliseconds of a step beyond `step_cost`, as the module says.

    Args:
        step_cost: the table.
        forward_only: whether it is of forward passes, without attention, sampling and drafting.

    Attributes:
        coefficients: float64 [4], fixed, for each request, for each draft token, and for a step with any.
    """

    def __init__(self, step_cost: StepCost, forward_only: bool = False):
        self._doubt, cheapest = _doubt(step_cost), float(step_cost.milliseconds.min())
        self._believed = np.array([0.0, 0.0, 0.0, UNMEASURED_SHARE * cheapest * forward_only])
        self._alike = UNMEASURED_ALIKE * forward_only
        self.coefficients, self._without_table = self._believed.copy(), np.zeros(4)
        self._information, self._target = np.zeros((4, 4)), np.zeros(4)
        self._variance, self._least_variance = 0.0, (LEAST_NOISE * cheapest) ** 2
        self._steps = 0
        self._surprises: list[tuple[float, int, int, float]] = []

    def observe(self, requests: int, drafted: int, expected: float, milliseconds: float) -> bool:
        """Learn from a step; `expected` is what the table says. False if something else held it up."""
        corrected = max(0.0, expected + self.of(requests, drafted))
        if milliseconds > LARGEST_SURPRISE * max(corrected, 1e-3):
            self._surprises.append((milliseconds, requests, drafted, expected))
            if len(self._surprises) < SURPRISES_BELIEVED:
                return False
            milliseconds, requests, drafted, expected = min(self._surprises)
        self._surprises.clear()
        self._steps += 1
        # The first errors are of what had not been learnt yet: they lose their weight sooner than in a mean.
        forget = max(2.0 / (self._steps + 1), 1.0 / MEMORY_STEPS)
        self._variance = _learn(
            (self._information, self._target, self.coefficients, self._without_table),
            (self._doubt, self._believed, self._least_variance, self._alike),
            (float(requests), float(drafted), milliseconds - expected),
            self._variance,
            forget,
        )
        return True

    def of(self, requests: int, drafted: float) -> float:
        fixed, each, token, speculating = self.coefficients.tolist()
        return fixed + each * requests + token * drafted + (speculating if drafted else 0.0)


def _doubt(step_cost: StepCost) -> np.ndarray:
    """float64 [4]: how far off the table may be in each coefficient, as standard deviations in milliseconds."""
    cells, requests, tokens = step_cost.milliseconds, step_cost.requests, step_cost.tokens_per_request
    cheapest, doubt = cells.min(), np.ones(4)
    each = (cells[-1, 0] - cells[0, 0]).mean() / max(1, requests[-1] - requests[0])
    token = (cells[-1, -1] - cells[-1, 0]).mean() / max(1, requests[-1] * (tokens[-1] - tokens[0]))
    doubt[1] = REQUEST_DOUBT * each + LEAST_REQUEST_DOUBT * cheapest
    doubt[2] = TOKEN_DOUBT * token + LEAST_TOKEN_DOUBT * cheapest
    doubt[3] = SPECULATING_DOUBT * cheapest
    return doubt
