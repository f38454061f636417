"""The report's pictures of one rollout as it went: what ran, was drafted and accepted, and where a step's time went."""

import numpy as np

from recipe.record.rollout_metrics import rejected_seconds, token_milliseconds
from recipe.report.runs import Run
from sam.record.engine_steps import EngineSteps

POINTS = 120  # of a curve over time
PARTS = {"forward": "#0072B2", "verify": "#E69F00", "draft": "#009E73", "other": "#BBBBBB"}


def median_step(run: Run) -> int:
    """The training step whose rollout took as long as most."""
    ordered = sorted(run.steps, key=lambda step: run.metrics[step][run.rollout_key])
    return ordered[len(ordered) // 2]


def over_time(steps: EngineSteps, columns: dict[str, np.ndarray]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """Values of each engine step as means over equal spans of time, weighed by the steps' duration.

    Returns:
        float [POINTS], seconds at the spans' ends, and the means of each column.
    """
    milliseconds = steps.step_ms.astype(np.float64)
    ends = np.cumsum([0.0, *milliseconds])
    edges = np.linspace(0.0, ends[-1], POINTS + 1)
    summed = {name: np.cumsum([0.0, *(column * milliseconds)]) for name, column in columns.items()}
    means = {name: np.diff(np.interp(edges, ends, sums)) / np.diff(edges) for name, sums in summed.items()}
    return edges[1:] / 1e3, means


def draw_drafts(axes, runs: list[Run], looks) -> None:
    """`looks`: of recipe.report.plots, here and below."""
    run, *others = runs
    step = median_step(run)
    steps = run.engine_steps(step)
    time, means = over_time(steps, {name: getattr(steps, name) for name in ("running", "drafted", "accepted")})
    axes.fill_between(time, means["drafted"], color="#D55E00", alpha=0.35, label="draft tokens verified, a step")
    axes.fill_between(time, means["accepted"], color="#009E73", alpha=0.8, label="accepted, a step")
    axes.plot(time, means["running"], color="#222222", label=f"running requests, {run.name}")
    for other in others[:1]:
        if step in other.steps:
            theirs = other.engine_steps(step)
            time, means = over_time(theirs, {"running": theirs.running})
            axes.plot(time, means["running"], color="#222222", linestyle=":", label=f"running requests, {other.name}")
    axes.set_ylim(0)
    label(axes, f"seconds of rollout in training step {step}", "requests or tokens")


def draw_running(axes, runs: list[Run], looks) -> None:
    step = median_step(runs[0])
    for run in runs:
        if step not in run.steps:
            continue
        steps = run.engine_steps(step)
        time = np.cumsum(steps.step_ms) / 1e3
        looks.line(axes, run, time, steps.running, drawstyle="steps-pre")
        if looks.threshold is not None:
            where = steps.in_tail(looks.threshold)
            shaded = {"step": "pre", "color": looks.colors[run.name], "alpha": 0.15}
            axes.fill_between(time, 0, steps.running, where=where, **shaded)
    if looks.threshold is not None:
        axes.axhline(looks.threshold, color="grey", linewidth=0.8, linestyle=":")
    label(axes, f"seconds of rollout in training step {step}", "running requests")


def draw_step_time(axes, runs: list[Run], looks) -> str:
    """Returns what verifying rejected drafts took."""
    run = runs[0]
    step = median_step(run)
    steps = run.engine_steps(step)
    parts = {"forward": steps.forward_ms, "verify": steps.verify_ms, "draft": steps.draft_ms}
    time, means = over_time(steps, {**parts, "other": np.maximum(0.0, steps.step_ms - sum(parts.values()))})
    axes.stackplot(time, *means.values(), colors=list(PARTS.values()), labels=list(PARTS))
    label(axes, f"seconds of rollout in training step {step}", "milliseconds of a step")
    return (
        f"A token more takes {token_milliseconds(steps):.2f} ms, rejected drafts took {rejected_seconds(steps):.2f} s "
        f"of {time[-1]:.2f} s (least squares of the time over requests and draft tokens)."
    )


def label(axes, x: str, y: str, legend: bool = True) -> None:
    """Name the axes, in the size of a small picture."""
    axes.set_xlabel(x, fontsize=9)
    axes.set_ylabel(y, fontsize=9)
    if legend:
        axes.legend(frameon=False, fontsize=8)
