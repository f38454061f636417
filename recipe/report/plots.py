"""The report's pictures: small enough to stand side by side, each drawn where a run has recorded what it shows."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from recipe.report.figures import ACCURACY, LEARNT, LENGTH, REWARD, Curve
from recipe.report.runs import Run
from sam.bench.charts import COLORS
from sam.command import new_figure
from sam.page import chart
from sam.record.engine_steps import EngineSteps

SPARE_COLORS = ("#0072B2", "#CC79A7", "#56B4E9", "#B2182B", "#F0E442")  # Okabe and Ito's, for a method's second run
DASHES = {"off": "--", "ngram": "-.", "suffix": ":"}
SIZE, WIDE = (4.8, 3.0), (6.6, 3.1)  # inches; the first picture is as wide as two
POINTS = 120  # of a curve over time
# Parts of the page, in reading order; the pictures of FIRST stand below the answer without a heading.
FIRST, TIME, ACCEPTANCE, TRAINING = "", "Where the time went", "Acceptance", "Training"


class Drawing(NamedTuple):
    """What is drawn: the runs, colour, dashes and label of each by its name, and the figures of summary.json."""

    runs: list[Run]
    styles: dict[str, dict[str, str]]
    summary: dict


class Picture(NamedTuple):
    """A picture of a part of the page; `draw` takes axes and a Drawing, and says whether there is something to see."""

    part: str
    title: str
    caption: str
    draw: Callable[..., bool]


def draw_all(runs: list[Run], summary: dict) -> dict[str, list[str]]:
    """Charts of what the runs have recorded, as HTML, by their part of the page."""
    drawing, charts = Drawing(runs, styles_of([run.name for run in runs]), summary), {}
    for part, title, caption, draw in PICTURES:
        figure = new_figure(*(SIZE if charts else WIDE))
        axes = figure.subplots()
        if draw(axes, drawing):
            axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=8)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(frameon=False, fontsize=8)
            charts.setdefault(part, []).append(chart(figure, title, caption))
    return charts


def styles_of(names: list[str]) -> dict[str, dict[str, str]]:
    """A method's own colour for its first run, a colour of its own for every other run.

    Example:
        >>> styles = styles_of(["sam", "off", "sam 2"])
        >>> len({style["color"] for style in styles.values()})
        3
    """
    others = [name for name in names if name not in COLORS]
    colors = COLORS | {name: SPARE_COLORS[i % len(SPARE_COLORS)] for i, name in enumerate(others)}
    dashes = {name: DASHES.get(name.split()[0], "-") for name in names}  # a second run of a method is "sam 2"
    return {name: {"label": name, "color": colors[name], "linestyle": dashes[name]} for name in names}


def over_time(steps: EngineSteps, name: str) -> tuple[np.ndarray, np.ndarray]:
    """A column as means over equal spans of time, weighed by the steps' duration.

    Returns:
        float [POINTS], seconds at the spans' ends, and the means.
    """
    milliseconds = steps.step_ms.astype(np.float64)
    ends, sums = (np.cumsum([0.0, *values]) for values in (milliseconds, getattr(steps, name) * milliseconds))
    edges = np.linspace(0.0, ends[-1], POINTS + 1)
    return edges[1:] / 1e3, np.diff(np.interp(edges, ends, sums)) / np.diff(edges)


def _drafts(axes, drawing: Drawing) -> bool:
    first = drawing.runs[0]
    if not first.recorded:
        return False
    ordered = sorted(first.steps, key=lambda step: first.metrics[step][first.rollout_key])
    step = ordered[len(ordered) // 2]
    steps = first.engine_steps(step)
    axes.fill_between(*over_time(steps, "drafted"), color="#D55E00", alpha=0.35, label="draft tokens verified, a step")
    axes.fill_between(*over_time(steps, "accepted"), color="#009E73", alpha=0.8, label="accepted, a step")
    for run in drawing.runs:
        if run.recorded and step in run.steps:
            style = drawing.styles[run.name] | {"color": "#222222", "label": f"running requests, {run.name}"}
            axes.plot(*over_time(run.engine_steps(step), "running"), **style)
    axes.set_ylim(0)
    return _named(axes, f"seconds of rollout in training step {step}", "running requests, or tokens")


def _curve(curve: Curve, axes, drawing: Drawing) -> bool:
    having = [run for run in drawing.runs if run.series(curve.key)[0]]
    # The last run is drawn thin and on top, so that equal curves are seen to be several.
    for number, run in enumerate(having):
        style = drawing.styles[run.name]
        axes.plot(*run.series(curve.key), linewidth=max(1.2, 5 - 2 * number), marker=".", **style)
        for key in sorted({key for row in run.metrics.values() for key in row}) if curve == ACCURACY else ():
            if key.startswith("val-core/") and "/acc/mean" in key:
                circles = style | {"label": f"{run.name}, validation", "linestyle": ""}
                axes.plot(*run.series(key), "o", markersize=6, markerfacecolor="none", **circles)
    return bool(having) and _named(axes, "training step", curve.unit)


def _rollout_time(axes, drawing: Drawing) -> bool:
    found = {name: [its["rollout"], its["tail"]] for name, its in drawing.summary["seconds"].items()}
    count = 1 if any(None in values for values in found.values()) else 2
    positions, width = np.arange(count), 0.8 / len(found)
    for index, (name, values) in enumerate(found.items()):
        style = {"label": name, "color": drawing.styles[name]["color"]}
        bars = axes.bar(positions + index * width, values[:count], width * 0.92, **style)
        axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
    names = ["rollout", f"its tail (at most {drawing.summary['tail_threshold']} running)"]
    axes.set_xticks(positions + width * (len(found) - 1) / 2, names[:count])
    axes.margins(y=0.12)
    return _named(axes, "", "seconds, all steps")


def _by_position(axes, drawing: Drawing) -> bool:
    drawn = False
    for run in filter(lambda run: run.recorded, drawing.runs):
        verified = sum(part.position_steps for part in run.recorded)
        emitted = sum(part.position_emitted for part in run.recorded)
        if np.any(used := verified > 0):
            starts = np.arange(len(verified)) * run.recorded[0].position_bin
            axes.plot(starts[used], emitted[used] / verified[used], marker="o", **drawing.styles[run.name])
            drawn = True
    axes.axhline(1.0, color="grey", linewidth=0.8)
    return drawn and _named(axes, "position in the response (tokens)", "mean acceptance length")


def _identical(axes, drawing: Drawing) -> bool:
    counts = drawing.summary["identical_by_step"]
    shares = [same / total if total else 0.0 for same, total in counts.values()]
    axes.bar(list(map(int, counts)), shares, color=COLORS["sam"], width=0.7)
    axes.set_ylim(0, 1.05)
    return bool(counts) and _named(axes, "training step", "share of responses")


def _named(axes, x: str, y: str) -> bool:
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    return True


def _of(part: str, *curves: Curve) -> list[Picture]:
    return [Picture(part, one.name[0].upper() + one.name[1:], one.caption, partial(_curve, one)) for one in curves]


GRAPHS = (
    Curve("graphs, steps with drafts", "rollout/graph_share/with_drafts", "share", "Steps that replayed a graph."),
    Curve("graphs, other steps", "rollout/graph_share/without_drafts", "share", "Steps that replayed a graph."),
)
ACCEPTED = (
    Curve("over training", "rollout/spec_accept_length", "mean acceptance length", "1 is no gain."),
    Curve(
        "the draft model over training", "rollout/spec_draft_model_accept_rate", "accepted / drafted", "Of its tokens."
    ),
)
PICTURES = [
    Picture(
        FIRST,
        "Running requests, and the drafts verified and accepted",
        "A rollout of median length: requests that ran and, in each of the first run's engine steps, the draft tokens "
        "that the switch let through and those of them that were accepted.",
        _drafts,
    ),
    *_of(FIRST, REWARD, LENGTH, ACCURACY),
    Picture(TIME, "Rollout in all of verl", "Measured in the server, summed over the steps.", _rollout_time),
    *_of(TIME, *GRAPHS),
    *_of(ACCEPTANCE, *ACCEPTED),
    Picture(ACCEPTANCE, "By position in the response", "Tokens per verify step of a request.", _by_position),
    *_of(TRAINING, *LEARNT),
    Picture(TRAINING, "Identical responses", "The same token for token in the first two runs.", _identical),
]
