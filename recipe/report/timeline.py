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


def draw_drafts(axes, runs: list[Run], threshold: int | None) -> None:
    run = runs[0]
    step = median_step(run)
    steps = run.engine_steps(step)
    time, means = over_time(steps, {name: getattr(steps, name) for name in ("running", "drafted", "accepted")})
    axes.plot(time, means["running"], color="#555555", label="running requests")
    axes.fill_between(time, means["drafted"], color="#D55E00", alpha=0.35, label="draft tokens verified, a step")
    axes.fill_between(time, means["accepted"], color="#009E73", alpha=0.8, label="accepted, a step")
    axes.set_xlabel(f"seconds of rollout in training step {step}, {run.name}")
    axes.legend(frameon=False)


def draw_step_time(axes, runs: list[Run], threshold: int | None) -> None:
    run = runs[0]
    step = median_step(run)
    steps = run.engine_steps(step)
    parts = {"forward": steps.forward_ms, "verify": steps.verify_ms, "draft": steps.draft_ms}
    time, means = over_time(steps, {**parts, "other": np.maximum(0.0, steps.step_ms - sum(parts.values()))})
    axes.stackplot(time, *means.values(), colors=list(PARTS.values()), labels=list(PARTS))
    lost, cost = rejected_seconds(steps), token_milliseconds(steps)
    axes.set_title(f"a token more: {cost:.2f} ms; on rejected drafts: {lost:.2f} s of {time[-1]:.2f} s", fontsize=9)
    axes.set(xlabel=f"seconds of rollout in training step {step}, {run.name}", ylabel="milliseconds of a step")
    axes.legend(frameon=False)
