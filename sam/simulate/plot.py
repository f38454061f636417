"""Running requests over time with the tail shaded, and how much of the rollout it is."""

from pathlib import Path

import numpy as np

from sam.command import new_figure
from sam.simulate.engine import Played
from sam.simulate.rollout import slowest, tail_seconds

NORMAL, TAIL = "#4c72b0", "#c44e52"


def plot_rollouts(rollouts: list[tuple[str, Played]], threshold: int, path: Path) -> None:
    """One panel for each rollout, of its slowest engine, and one with their seconds split where the tail begins.

    Raises:
        ValueError: matplotlib is not installed.
    """
    figure = new_figure(11, 2.6 * len(rollouts))
    grid = figure.add_gridspec(len(rollouts), 3)
    timelines = [slowest(played) for _, played in rollouts]
    longest = max(timeline["end_ms"][-1] for timeline in timelines) / 1e3
    for row, ((name, _), timeline) in enumerate(zip(rollouts, timelines, strict=True)):
        axes = figure.add_subplot(grid[row, :2])
        ends = timeline["end_ms"] / 1e3
        axes.stairs(timeline["running"], np.concatenate([[0.0], ends]), color=NORMAL)
        tail = tail_seconds(timeline, threshold)
        axes.axvspan(ends[-1] - tail, ends[-1], color=TAIL, alpha=0.2, label=f"tail, at most {threshold} running")
        axes.set_xlim(0, 1.02 * longest)
        axes.set_title(f"{name}: {ends[-1]:.0f} s, of them {tail:.0f} s tail", fontsize=10)
        axes.set_ylabel("running requests")
        axes.legend(fontsize=8, loc="upper right")
    axes.set_xlabel("seconds, slowest engine")
    bars = figure.add_subplot(grid[:, 2])
    for place, timeline in enumerate(timelines):
        tail = tail_seconds(timeline, threshold)
        rest = timeline["end_ms"][-1] / 1e3 - tail
        bars.bar(place, rest, color=NORMAL, label=None if place else "before the tail")
        bars.bar(place, tail, bottom=rest, color=TAIL, hatch="//", label=None if place else "tail")
    bars.set_xticks(range(len(rollouts)), [name for name, _ in rollouts])
    bars.set_ylabel("seconds")
    bars.legend(fontsize=8)
    figure.savefig(path, dpi=110)
