"""Fits a step-cost table to the engine steps that a training run recorded."""

from dataclasses import dataclass

import numpy as np

from sam.switch.step_cost import StepCost, least_squares_without_negative_terms

FEWEST_STEPS = 20
KNOTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
CONTEXT_UNIT = 1024.0
LONGEST_DRAFT = 15  # tokens up to which the table goes
ROUNDS = 8  # of weighing outliers down
OUTLIER = 2.0  # times the median error, beyond which a step counts less and less
RARE = 5  # percent of the steps without drafts, which may happen to have found none
STALL = 20.0  # times the fitted milliseconds, beyond which a step was held up by something else and does not count


@dataclass(frozen=True)
class FittedCost:
    """A table fitted to recorded steps.

    Attributes:
        cost: the table; the sum of its costs over the recorded steps is the recorded sum.
        admit_ms: milliseconds that a new request adds to its first step.
        error: mean absolute difference from the recorded steps, as a share of the mean step.
        drafts_seen: whether any step verified drafts; if not, a draft token is taken to cost as much as a request.
        plain_from: fewest requests of a step without drafts, once all have come: for fewer, its cost is a guess.
    """

    cost: StepCost
    admit_ms: float
    error: float
    drafts_seen: bool
    plain_from: int


def fit_from_steps(
    running: np.ndarray,
    drafted: np.ndarray,
    step_ms: np.ndarray,
    admitted: np.ndarray | None = None,
    context: np.ndarray | None = None,
) -> FittedCost:
    """Fit h(rows) + a x [any drafts] + b x requests + c x requests x context + d x admitted, all rising.

    h is linear between KNOTS and goes on with its last slope. Steps that something else held up count little for the
    shape, but the table is scaled so that the time of all steps is what it was, without the worst of them (STALL).

    Args:
        running, drafted: int [steps], requests, and draft tokens verified.
        step_ms: float [steps], milliseconds.
        admitted: int [steps], requests that came with the step.
        context: float [steps], mean tokens of a request.

    Raises:
        ValueError: too few steps.
    """
    running, drafted, step_ms = (np.asarray(column, dtype=np.float64) for column in (running, drafted, step_ms))
    used = (running > 0) & (step_ms > 0)
    if used.sum() < FEWEST_STEPS:
        raise ValueError(f"{used.sum()} recorded engine steps: expected at least {FEWEST_STEPS} to fit step costs to")
    zeros = np.zeros(len(running))
    admitted, context = (zeros if c is None else np.asarray(c, np.float64) for c in (admitted, context))
    model = _Model(running[used], drafted[used], admitted[used], context[used])
    coefficients = _robust(model.features, step_ms[used])
    predicted = model.features @ coefficients
    recorded = step_ms[used]
    counted = recorded <= STALL * predicted
    scale = recorded[counted].sum() / predicted[counted].sum()
    error = float(np.abs(scale * predicted - recorded)[counted].mean() / recorded[counted].mean())
    how = "" if model.drafts_seen else "; no drafts seen: a draft token taken to cost what a request costs"
    stalls = f", {(~counted).sum()} stalls left out" if not counted.all() else ""
    source = f"fitted to {used.sum()} recorded engine steps, mean error {error:.0%}{stalls}{how}"
    cost = model.table(scale * coefficients, source)
    plain = running[used & (drafted == 0) & (admitted == 0)]
    return FittedCost(
        cost,
        float(scale * coefficients[model.admit]),
        error,
        model.drafts_seen,
        int(np.percentile(plain, RARE)) if len(plain) else int(running.max()),
    )


class _Model:
    """The features of recorded steps, and the table that their coefficients make."""

    def __init__(self, running, drafted, admitted, context):
        self.drafts_seen = bool((drafted > 0).any())
        self._most_requests = int(running.max())
        self._most_context = int(context.max())
        rows = running + drafted
        # The last piece takes the upper half of the rows, since its slope goes on beyond them; and a piece that no step
        # lies in would get a slope from nowhere.
        knots = [k for k in KNOTS if k == 1 or k < rows.max() / 2]
        self._knots = np.array([k for k, end in zip(knots, [*knots[1:], np.inf], strict=True)
                                if k == 1 or ((rows > k) & (rows <= end)).any()], dtype=np.float64)  # fmt: skip
        columns = [*self._pieces(rows), drafted > 0, running * self.drafts_seen, running * context / CONTEXT_UNIT]
        self.features = np.stack([*columns, admitted], axis=1).astype(np.float64)
        self.admit = self.features.shape[1] - 1

    def _pieces(self, rows: np.ndarray) -> list[np.ndarray]:
        """One, and how much of each piece between knots lies below `rows`."""
        ends = np.append(self._knots[1:], np.inf)
        return [np.ones_like(rows), *(np.clip(rows, k, e) - k for k, e in zip(self._knots, ends, strict=True))]

    def table(self, coefficients: np.ndarray, source: str) -> StepCost:
        requests = np.unique(np.append([k for k in KNOTS if k < self._most_requests], self._most_requests))
        tokens = np.arange(1, LONGEST_DRAFT + 2)
        context = np.array([1, self._most_context]) if self._most_context > 1 else np.array([1])
        r, m, c = (axis.astype(np.float64) for axis in np.meshgrid(requests, tokens, context, indexing="ij"))
        columns = [*self._pieces(r * m), m > 1, r * self.drafts_seen, r * c / CONTEXT_UNIT]
        cells = sum(weight * column for weight, column in zip(coefficients, columns, strict=False))
        return StepCost(requests, tokens, context, np.maximum(cells, 1e-3), source=source)


def _robust(features: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Coefficients of at least 0, by least squares reweighted as Huber does."""
    scale = np.maximum(np.abs(features).max(axis=0), 1e-12)
    unit, weights = features / scale, np.ones(len(target))
    for _ in range(ROUNDS):
        root = np.sqrt(weights)
        found = least_squares_without_negative_terms(unit * root[:, None], target * root)
        error = np.abs(unit @ found - target)
        weights = np.minimum(1.0, OUTLIER * max(np.median(error), 1e-9) / np.maximum(error, 1e-9))
    return found / scale
