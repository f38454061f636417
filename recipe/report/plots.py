"""The report's pictures: small enough to stand side by side, each drawn where a run has recorded what it shows."""

from collections.abc import Callable
from functools import partial

import numpy as np
from matplotlib.figure import Figure

from recipe.report.figures import ACCURACY, LEARNT, LENGTH, REWARD, Curve
from recipe.report.runs import Run
from sam.page import Picture, picture
from sam.record.engine_steps import EngineSteps

COLORS = {
    "off": "#999999", "sam": "#009E73", "ngram": "#D55E00", "suffix": "#E69F00", "draft_model": "#8C510A",
    "hybrid": "#6A3D9A", "eagle3": "#882255",
}  # fmt: skip
SPARE_COLORS = ("#0072B2", "#CC79A7", "#56B4E9", "#B2182B", "#F0E442")  # Okabe and Ito's, for a method's second run
DASHES = {"off": "--", "ngram": "-.", "suffix": ":"}
SIZE, WIDE = (4.8, 3.0), (6.6, 3.1)  # inches; the first picture is as wide as two
POINTS = 120  # of a curve over time
# Parts of the page, in reading order; the pictures of FIRST stand below the answer without a heading.
FIRST, ACCEPTANCE, TRAINING = "", "Acceptance", "Training"
Labels = tuple[str, str] | None  # of the axes; None: there is nothing to see


def draw_all(runs: list[Run]) -> dict[str, list[Picture]]:
    """What the runs have recorded, by part of the page."""
    styles, found = [style_of(run.name, number) for number, run in enumerate(runs)], {}
    for part, title, caption, draw in PICTURES:
        figure = Figure(figsize=SIZE if found else WIDE, layout="constrained")
        axes = figure.subplots()
        if (labels := draw(axes, list(zip(runs, styles, strict=True)))) is not None:
            axes.set_xlabel(labels[0], fontsize=9)
            axes.set_ylabel(labels[1], fontsize=9)
            axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=8)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(frameon=False, fontsize=8)
            found.setdefault(part, []).append(picture(figure, title, caption))
    return found


def style_of(name: str, number: int) -> dict[str, str]:
    """Label, dashes and colour of run `number`: its method's own, or a spare one for a second run, "sam 2"."""
    color = COLORS.get(name, SPARE_COLORS[number % len(SPARE_COLORS)])
    return {"label": name, "color": color, "linestyle": DASHES.get(name.split()[0], "-")}


def over_time(steps: EngineSteps, name: str) -> tuple[np.ndarray, np.ndarray]:
    """A column as means over equal spans of time, weighed by the steps' duration.

    Returns:
        float [POINTS], seconds at the spans' ends, and the means.
    """
    milliseconds = steps.step_ms.astype(np.float64)
    ends, sums = (np.cumsum([0.0, *values]) for values in (milliseconds, getattr(steps, name) * milliseconds))
    edges = np.linspace(0.0, ends[-1], POINTS + 1)
    return edges[1:] / 1e3, np.diff(np.interp(edges, ends, sums)) / np.diff(edges)


def _drafts(axes, runs: list[tuple[Run, dict]]) -> Labels:
    first = runs[0][0]
    if not first.recorded:
        return None
    ordered = sorted(first.steps, key=lambda step: first.metrics[step][first.rollout_key])
    steps = first.recorded[step := ordered[len(ordered) // 2]]
    axes.fill_between(*over_time(steps, "drafted"), color="#D55E00", alpha=0.35, label="draft tokens verified, a step")
    axes.fill_between(*over_time(steps, "accepted"), color="#009E73", alpha=0.8, label="accepted, a step")
    for run, style in runs:
        if step in run.recorded:
            style = style | {"color": "#222222", "label": f"running requests, {run.name}"}
            axes.plot(*over_time(run.recorded[step], "running"), **style)
    axes.set_ylim(0)
    return f"seconds of rollout in training step {step}", "running requests, or tokens"


def _curve(curve: Curve, axes, runs: list[tuple[Run, dict]]) -> Labels:
    having = [(run, style) for run, style in runs if run.series(curve.key)[0]]
    # The last run is drawn thin and on top, so that equal curves are seen to be several.
    for number, (run, style) in enumerate(having):
        axes.plot(*run.series(curve.key), linewidth=max(1.2, 5 - 2 * number), marker=".", **style)
        for key in sorted({key for row in run.metrics.values() for key in row}) if curve == ACCURACY else ():
            if key.startswith("val-core/") and "/acc/mean" in key:
                circles = style | {"label": f"{run.name}, validation", "linestyle": ""}
                axes.plot(*run.series(key), "o", markersize=6, markerfacecolor="none", **circles)
    return ("training step", curve.unit) if having else None


def _by_position(axes, runs: list[tuple[Run, dict]]) -> Labels:
    for run, style in runs:
        steps = list(run.recorded.values())
        verified, emitted = (sum(getattr(one, f"position_{name}") for one in steps) for name in ("steps", "emitted"))
        if np.any(used := verified > 0):
            starts = np.arange(len(verified)) * steps[0].position_bin
            axes.plot(starts[used], emitted[used] / verified[used], marker="o", **style)
    drawn = bool(axes.lines)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    return ("position in the response (tokens)", "mean acceptance length") if drawn else None


def _of(part: str, *curves: Curve) -> list[tuple[str, str, str, Callable[..., Labels]]]:
    return [(part, one.name[0].upper() + one.name[1:], one.caption, partial(_curve, one)) for one in curves]


ACCEPTED = Curve("over training", "rollout/spec_accept_length", "mean acceptance length", "1 is no gain.")
# Part of the page, title, caption, and what draws runs with their styles on axes.
PICTURES: list[tuple[str, str, str, Callable[..., Labels]]] = [
    (
        FIRST,
        "Running requests, and the drafts verified and accepted",
        "A rollout of median length: requests that ran and, in each of the first run's engine steps, the draft tokens "
        "that the switch let through and those of them that were accepted.",
        _drafts,
    ),
    *_of(FIRST, REWARD, LENGTH, ACCURACY),
    *_of(ACCEPTANCE, ACCEPTED),
    (ACCEPTANCE, "By position in the response", "Tokens per verify step of a request.", _by_position),
    *_of(TRAINING, *LEARNT),
]
