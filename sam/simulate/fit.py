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
    admitted: np.ndarray | int = 0,
    context: np.ndarray | int = 0,
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
    columns = np.array(np.broadcast_arrays(running, drafted, step_ms, admitted, context), dtype=np.float64)
    used = (columns[0] > 0) & (columns[2] > 0)
    if used.sum() < FEWEST_STEPS:
        raise ValueError(f"{used.sum()} recorded engine steps: expected at least {FEWEST_STEPS} to fit step costs to")
    running, drafted, step_ms, admitted, context = columns[:, used]
    drafts_seen, knots = bool((drafted > 0).any()), _knots(running + drafted)
    # Without drafts a token's cost cannot be told from a request's.
    seen = _features(knots, running, running + drafted, drafted > 0, running * drafts_seen, context)
    features = np.stack([*seen, admitted], axis=1).astype(np.float64)
    coefficients = _robust(features, step_ms)
    predicted = features @ coefficients
    counted = step_ms <= STALL * predicted
    scale = step_ms[counted].sum() / predicted[counted].sum()
    error = float(np.abs(scale * predicted - step_ms)[counted].mean() / step_ms[counted].mean())

    most_requests, most_context = int(running.max()), int(context.max())
    axes = (
        np.unique(np.append([k for k in KNOTS if k < most_requests], most_requests)),
        np.arange(1, LONGEST_DRAFT + 2),
        np.array([1, most_context]) if most_context > 1 else np.array([1]),
    )
    r, m, c = (axis.astype(np.float64) for axis in np.meshgrid(*axes, indexing="ij"))
    terms = _features(knots, r, r * m, m > 1, r * drafts_seen, c)
    cells = sum(weight * term for weight, term in zip(scale * coefficients, terms, strict=False))
    how = "" if drafts_seen else "; no drafts seen: a draft token taken to cost what a request costs"
    stalls = f", {(~counted).sum()} stalls left out" if not counted.all() else ""
    source = f"fitted to {used.sum()} recorded engine steps, mean error {error:.0%}{stalls}{how}"
    plain = running[(drafted == 0) & (admitted == 0)]
    return FittedCost(
        StepCost(*axes, np.maximum(cells, 1e-3), source=source),
        float(scale * coefficients[-1]),
        error,
        drafts_seen,
        int(np.percentile(plain, RARE)) if len(plain) else most_requests,
    )


def _knots(rows: np.ndarray) -> np.ndarray:
    """KNOTS that steps of `rows` rows can tell a slope from.

    The last piece takes the upper half of the rows, since its slope goes on beyond them; and a piece that no step lies
    in would get a slope from nowhere.
    """
    knots = [k for k in KNOTS if k == 1 or k < rows.max() / 2]
    pieces = zip(knots, [*knots[1:], np.inf], strict=True)
    return np.array([k for k, end in pieces if k == 1 or ((rows > k) & (rows <= end)).any()], dtype=np.float64)


def _features(knots, requests, rows, drafting, per_request, context) -> list[np.ndarray]:
    """One, how much of each piece between knots lies below `rows`, and the other terms of a step's cost."""
    ends = np.append(knots[1:], np.inf)
    pieces = [np.clip(rows, k, end) - k for k, end in zip(knots, ends, strict=True)]
    return [np.ones_like(rows), *pieces, drafting, per_request, requests * context / CONTEXT_UNIT]


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
