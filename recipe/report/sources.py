"""Where the draft tokens of a run came from: its table, and its bars over the training steps."""

import numpy as np

from recipe.report.runs import Run
from recipe.report.timeline import label
from sam.drafting.origins import SOURCES

TOKENS, SHARE, RIGHT = (f"rollout/spec_source_{name}" for name in ("tokens", "share", "accept_rate"))
HEADER = ("run", "steps", "source", "share of draft tokens", "of them right")
# Okabe and Ito's, the own text darkest; in the order of SOURCES.
COLORS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#999999")


def has_sources(run: Run) -> bool:
    return bool(run.series(TOKENS)[0])


def counts(run: Run, steps: list[int]) -> np.ndarray:
    """float [steps, SOURCES, 2], draft tokens counted and right."""
    rows = [run.metrics[step] for step in steps]
    drafted = np.array([[row[TOKENS] * row.get(f"{SHARE}/{source}", 0.0) for source in SOURCES] for row in rows])
    rates = np.array([[row.get(f"{RIGHT}/{source}", 0.0) for source in SOURCES] for row in rows])
    return np.stack([drafted, drafted * rates], axis=-1)


def by_source(runs: list[Run]) -> list[tuple]:
    """One row for each source of a third of the steps that were counted, of each run, as HEADER."""
    rows = []
    for run in filter(has_sources, runs):
        for third in np.array_split(run.series(TOKENS)[0], 3):
            if not len(third):
                continue
            drafted, right = counts(run, third.tolist()).sum(axis=0).T
            for source, of_it, accepted in zip(SOURCES, drafted, right, strict=True):
                if of_it:
                    share, rate = f"{100 * of_it / drafted.sum():.1f} %", f"{accepted / of_it:.2f}"
                    rows.append((run.name, f"{third[0]} to {third[-1]}", source.replace("_", " "), share, rate))
    return rows


def draw_sources(axes, runs: list[Run], looks) -> None:
    """A bar for each training step of the first run, a part for each source; the legend has what was right of it."""
    steps = runs[0].series(TOKENS)[0]
    drafted, right = np.moveaxis(counts(runs[0], steps), -1, 0)
    shares, below = drafted / drafted.sum(axis=1, keepdims=True), np.zeros(len(steps))
    for source, color, share, tokens, accepted in zip(SOURCES, COLORS, shares.T, drafted.T, right.T, strict=True):
        if tokens.any():
            name = f"{source.replace('_', ' ')}, {accepted.sum() / tokens.sum():.2f} right"
            axes.bar(steps, share, 0.85, bottom=below, color=color, label=name)
            below = below + share
    axes.set_ylim(0, 1)
    label(axes, "training step", "share of draft tokens", legend=False)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0), reverse=True)
