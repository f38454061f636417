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
    names, timelines = [name for name, _ in rollouts], [slowest(played) for _, played in rollouts]
    seconds = np.array([timeline["end_ms"][-1] / 1e3 for timeline in timelines])
    tails = np.array([tail_seconds(timeline, threshold) for timeline in timelines])
    for row, (name, timeline, end, tail) in enumerate(zip(names, timelines, seconds, tails, strict=True)):
        axes = figure.add_subplot(grid[row, :2])
        axes.stairs(timeline["running"], np.concatenate([[0.0], timeline["end_ms"] / 1e3]), color=NORMAL)
        axes.axvspan(end - tail, end, color=TAIL, alpha=0.2, label=f"tail, at most {threshold} running")
        axes.set(xlim=(0, 1.02 * seconds.max()), ylabel="running requests")
        axes.set_title(f"{name}: {end:.0f} s, of them {tail:.0f} s tail", fontsize=10)
        axes.legend(fontsize=8, loc="upper right")
    axes.set_xlabel("seconds, slowest engine")
    bars, places = figure.add_subplot(grid[:, 2]), np.arange(len(names))
    bars.bar(places, seconds - tails, color=NORMAL, label="before the tail")
    bars.bar(places, tails, bottom=seconds - tails, color=TAIL, hatch="//", label="tail")
    bars.set_xticks(places, names)
    bars.set_ylabel("seconds")
    bars.legend(fontsize=8)
    figure.savefig(path, dpi=110)
