"""Whether two runs' curves agree, in numbers, and where their time went, in the form of the published tables."""

from __future__ import annotations

import numpy as np

from recipe.paired import sign_flip_p_value
from recipe.report_data import Run

CURVES = {
    "reward": "rollout/reward_all/mean",
    "accuracy": "rollout/acc_all/mean",
    "response length": "response_length/mean",
    "entropy": "actor/entropy",
    "gradient norm": "actor/grad_norm",
}
AGREEMENT_HEADER = ("curve", "steps", "first, mean", "second, mean", "largest difference in a step", "p")
PHASE_HEADER = ("seconds a step", "first", "second", "saved, of the second", "saved, of the first (as published)")


def _pairs(first: Run, second: Run, key: str) -> np.ndarray:
    """float [steps, 2]: the values of the training steps that both runs have."""
    steps = [
        s for s in sorted(set(first.steps) & set(second.steps)) if key in first.metrics[s] and key in second.metrics[s]
    ]
    return np.array([(first.metrics[step][key], second.metrics[step][key]) for step in steps]).reshape(-1, 2)


def agreement(first: Run, second: Run) -> list[tuple]:
    """One row for each curve that both runs have, as AGREEMENT_HEADER; p of a paired test of the steps' differences."""
    rows = []
    for name, key in CURVES.items():
        pairs = _pairs(first, second, key)
        if len(pairs):
            difference = pairs[:, 0] - pairs[:, 1]
            means = [f"{value:.4g}" for value in pairs.mean(0)]
            largest, p = f"{np.abs(difference).max():.2g}", f"{sign_flip_p_value(difference):.3f}"
            rows.append((name, len(pairs), *means, largest, p))
    return rows


def phases(first: Run, second: Run) -> list[tuple]:
    """One row for each timed phase of both runs, longest first, as PHASE_HEADER.

    The published tables give (second - first) / first: 4159 s to 3793 s are their -9.6 %, of the second 8.8 %.
    """
    keys = {
        key for run in (first, second) for row in run.metrics.values() for key in row if key.startswith("timing_s/")
    }
    rows = []
    for key in ("rollout/seconds", *keys):
        pairs = _pairs(first, second, key)
        if len(pairs) and pairs.mean() >= 0.01:
            on, off = pairs.mean(0)
            saved = (f"{100 * (off - on) / whole:.1f} %" if whole else "" for whole in (off, on))
            rows.append((float(off), (key.removeprefix("timing_s/"), f"{on:.2f}", f"{off:.2f}", *saved)))
    return [row for _, row in sorted(rows, key=lambda pair: -pair[0])]
