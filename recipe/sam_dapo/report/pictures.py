"""The report's pictures: a step's phases, a rollout as it went, and curves over the training steps."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from recipe.sam_dapo.report.answer import COMPARED
from recipe.sam_dapo.report.phases import STEP, Phase, phases_of
from recipe.sam_dapo.report.runs import Run, rows_of
from sam.record.engine_steps import EngineSteps
from sam.tools.page import Picture, picture

LOOK = {
    "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.labelsize": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
}  # fmt: skip
COLORS = ("#009E73", "#999999", "#D55E00", "#E69F00", "#0072B2", "#CC79A7")  # of the runs, in turn; Okabe and Ito's
DASHES = ("-", "--", "-.", ":")
SIZE = (4.8, 3.0)  # inches
WIDE = (5.6, 2.4)  # is shown as wide as two where there is room
POINTS = 120  # of a curve over time
PHASE_COLORS = ("#0072B2", "#E69F00", "#CC79A7", "#56B4E9", "#F0E442", "#D55E00", "#BBBBBB")
INSIDE_COLORS = ("#004C78", "#001F33")  # of what is inside generation, the deeper the darker
NAMED_SHARE = 0.02  # of a training step, below which a phase has no name of its own

Labels = tuple[str, str] | None  # of the axes; None: there is nothing to see


class Curve(NamedTuple):
    """A metric over the training steps."""

    name: str
    key: str
    unit: str
    caption: str


SECONDS = Curve("seconds of a training step", "timing_s/step", "seconds", "Every step, the first ones too.")
REWARD = Curve("reward", COMPARED["reward"], "mean reward", "Of all responses, those of dropped groups too.")
LENGTH = Curve("response length", COMPARED["response length"], "tokens", "Mean of the responses trained on.")
ACCURACY = Curve("accuracy", COMPARED["accuracy"], "share of right answers", "Circles: the held-out set.")
ENTROPY = Curve("entropy", COMPARED["entropy"], "nats per token", "Of the policy on the responses trained on.")
GRADIENT = Curve("gradient norm", COMPARED["gradient norm"], "gradient norm", "Before clipping.")
ACCEPTED = Curve("acceptance", "rollout/spec_accept_length", "mean acceptance length", "1 is no gain.")
CURVES = (SECONDS, REWARD, LENGTH, ACCURACY, ENTROPY, GRADIENT, ACCEPTED)


def draw_phases(runs: list[Run]) -> list[Picture]:
    """The mean training step of each run as one bar; none where no step was timed."""
    phases = phases_of(runs)
    if phases[0].name != STEP or len(phases) < 2:
        return []
    caption = "Mean of the steps. Phases follow each other; the dark bars are the rollout inside gen, and its tail."
    return [_drawn(WIDE, "Where a training step's seconds go", caption, partial(_phases, phases), runs)]


def draw_rollout(runs: list[Run], against: dict[str, Any] | None) -> list[Picture]:
    """A rollout as it went, curves over the steps, and engines alone beside stock vLLM; what was recorded of them."""
    step = runs[0].median_step()
    rollout = f"In training step {step}, whose rollout took as long as most."
    drawn = [
        ("Running requests, drafts verified and accepted", f"{rollout} Drafts are {runs[0].name}'s.", _drafts),
        ("When each response was generated", f"{rollout} A line is a response, the same in both runs.", _responses),
        ("Acceptance by position in a draft", "Share of the drafts that reach a position.", _positions),
    ]
    if against:
        stock = "Engines alone emit this run's responses; the bars are medians, the lines ranges over rounds."
        drawn.append(("Beside stock vLLM", stock, partial(_stock, against)))
    drawn += [(curve.name.capitalize(), curve.caption, partial(_curve, curve)) for curve in CURVES]
    pictures = [_drawn(SIZE, title, caption, draw, runs) for title, caption, draw in drawn]
    return [picture for picture in pictures if picture]


def _drawn(size: tuple[float, float], title: str, caption: str, draw, runs: list[Run]) -> Picture | None:
    """What `draw(axes, runs)` draws; None where there is nothing to see."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(LOOK):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        if (labels := draw(axes, runs)) is None:
            return None
        axes.set(xlabel=labels[0], ylabel=labels[1], title=title)
        if axes.get_legend_handles_labels()[1] and not figure.legends and not axes.get_legend():
            axes.legend()
        return picture(figure, title, caption)


def _style(number: int, run: Run) -> dict[str, Any]:
    return {"label": run.name, "color": COLORS[number % len(COLORS)], "linestyle": DASHES[number % len(DASHES)]}


def _phases(phases: list[Phase], axes, runs: list[Run]) -> Labels:
    step, *parts = phases
    rows = np.arange(len(runs))[::-1]
    least = NAMED_SHARE * step.means.max()
    left = np.zeros(len(runs))
    siblings = [part for part in parts if part.depth == 0]
    small = [part for part in siblings if part.means.max() < least]
    bars = [(part.name, part.means) for part in siblings if part.means.max() >= least]
    if small:
        bars.append((f"{len(small)} smaller ones", sum(part.means for part in small)))
    for number, (name, means) in enumerate(bars):
        color = PHASE_COLORS[number % len(PHASE_COLORS)]
        axes.barh(rows, means, left=left, height=0.7, color=color, edgecolor="white", label=name)
        left += means
    for part in parts:
        if part.depth:
            color = INSIDE_COLORS[part.depth - 1]
            axes.barh(rows, part.means, height=0.32 / part.depth, color=color, label=f"{part.name} (inside gen)")
    for row, seconds in zip(rows, step.means, strict=True):
        axes.text(seconds, row, f" {seconds:.2f} s", va="center", fontweight="bold")
    axes.set_yticks(rows, [run.name for run in runs])
    axes.set_xlim(0, 1.15 * step.means.max())
    axes.figure.legend(loc="outside lower center", ncols=3, fontsize=8)
    return "seconds", ""


def over_time(steps: EngineSteps, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Ends of equal spans of time, float [POINTS] seconds, and a column's means in them by the steps' duration."""
    milliseconds = steps.step_ms.astype(np.float64)
    ends = np.cumsum([0.0, *milliseconds])
    sums = np.cumsum([0.0, *(getattr(steps, name) * milliseconds)])
    edges = np.linspace(0.0, ends[-1], POINTS + 1)
    return edges[1:] / 1e3, np.diff(np.interp(edges, ends, sums)) / np.diff(edges)


def _drafts(axes, runs: list[Run]) -> Labels:
    first = runs[0]
    if not first.recorded:
        return None
    step = first.median_step()
    steps = first.recorded[step]
    axes.fill_between(*over_time(steps, "drafted"), color="#D55E00", alpha=0.35, label="draft tokens verified, a step")
    axes.fill_between(*over_time(steps, "accepted"), color="#009E73", alpha=0.8, label="accepted, a step")
    for number, run in enumerate(runs):
        if step in run.recorded:
            style = _style(number, run) | {"color": "#222222", "label": f"running requests, {run.name}"}
            axes.plot(*over_time(run.recorded[step], "running"), **style)
    axes.set_ylim(0)
    return "seconds of rollout", "running requests, or tokens"


def _responses(axes, runs: list[Run]) -> Labels:
    step = runs[0].median_step()
    timed = [(number, run, run.spans(step)) for number, run in enumerate(runs[:2])]
    timed = [(number, run, spans) for number, run, spans in timed if spans]
    if not timed:
        return None
    # Rows are in the order of the ends in the baseline: the tail is at the top.
    _, _, baseline = timed[-1]
    order = sorted(baseline.items(), key=lambda item: item[1][1])
    row_of = {key: row for row, (key, _) in enumerate(order)}
    for number, run, spans in reversed(timed):
        begun = min(begin for begin, _ in spans.values())
        lines = [(row_of[key], begin - begun, end - begun) for key, (begin, end) in spans.items() if key in row_of]
        rows, begins, ends = np.array(lines).T
        width = 3.4 if number else 1.6
        color = COLORS[number]
        axes.hlines(rows, begins, ends, color=color, linewidth=width if len(rows) < 100 else width / 2, label=run.name)
    axes.set_xlim(0)
    axes.legend(loc="lower right")
    return "seconds since the first was asked for", "responses"


def _positions(axes, runs: list[Run]) -> Labels:
    drafting = []
    for number, run in enumerate(runs):
        drafted = _sum_of(run, "drafted_at")
        if drafted.any():
            drafting.append((number, run, _sum_of(run, "accepted_at") / np.maximum(drafted, 1)))
    width = 0.8 / max(1, len(drafting))
    for place, (number, run, rates) in enumerate(drafting):
        at = np.arange(1, len(rates) + 1) + (place - (len(drafting) - 1) / 2) * width
        axes.bar(at, rates, width, color=COLORS[number % len(COLORS)], label=run.name)
    if not drafting:
        return None
    axes.set_xticks(range(1, max(len(rates) for *_, rates in drafting) + 1))
    axes.set_ylim(0, 1)
    return "position of the draft token", "share accepted"


def _sum_of(run: Run, name: str) -> np.ndarray:
    parts = [getattr(steps, name) for steps in run.recorded.values()]
    return np.sum(parts, axis=0) if parts else np.zeros(0)


def _stock(against: dict[str, Any], axes, runs: list[Run]) -> Labels:
    rows = rows_of(against)
    names = list(rows)
    ratios = np.array([rows[name]["ratio"] for name in names])
    low = ratios - [rows[name]["low"] for name in names]
    high = [rows[name]["high"] for name in names] - ratios
    colors = ["#BBBBBB" if name in (names[0], "off") else COLORS[0] for name in names]
    axes.bar(names, ratios, 0.6, yerr=[low, high], color=colors, capsize=4)
    axes.axhline(1.0, color="#222222", linewidth=0.8, linestyle=":")
    return "engine", "times as fast as stock vLLM"


def _curve(curve: Curve, axes, runs: list[Run]) -> Labels:
    having = [(run, _style(number, run)) for number, run in enumerate(runs) if run.series(curve.key)[0]]
    # The last run is drawn thin and on top, so that equal curves are seen to be several.
    for number, (run, style) in enumerate(having):
        axes.plot(*run.series(curve.key), linewidth=max(1.2, 5 - 2 * number), marker=".", **style)
        for key in sorted({key for row in run.metrics.values() for key in row}) if curve == ACCURACY else ():
            if key.startswith("val-core/") and "/acc/mean" in key:
                circles = style | {"label": f"{run.name}, validation", "linestyle": ""}
                axes.plot(*run.series(key), "o", markersize=6, markerfacecolor="none", **circles)
    if curve == SECONDS:
        axes.set_ylim(0)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return ("training step", curve.unit) if having else None
