"""Speed-ups of `recipe.switch_bench` as bars, one panel for each workload."""

from __future__ import annotations

from pathlib import Path

import numpy as np

COLORS = {"off": "#BBBBBB", "goodput": "#009E73", "ngram": "#D55E00", "suffix": "#E69F00"}
FIXED = "#0072B2"  # thresholds, and always


def plot(rows: list[dict], title: str, path: Path) -> None:
    """Draw the medians of `switch_bench.table`'s rows with the range over the runs; `title` says when they are from."""
    from matplotlib.figure import Figure

    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    figure = Figure(figsize=(3.1 * len(workloads), 3.4), layout="constrained")
    panels = figure.subplots(1, len(workloads), squeeze=False)[0]
    for axes, workload in zip(panels, workloads, strict=True):
        of_workload = [row for row in rows if row["workload"] == workload]
        names, middles = [row["variant"] for row in of_workload], np.array([row["speedup"] for row in of_workload])
        low, high = np.transpose([row["range"] for row in of_workload])
        colors = [COLORS.get(name, FIXED) for name in names]
        axes.barh(range(len(names)), middles, color=colors, xerr=(middles - low, high - middles), capsize=2)
        for place, (end, middle) in enumerate(zip(high, middles, strict=True)):
            axes.text(end, place, f" {middle:.2f}", va="center", fontsize=8)
        axes.set_yticks(range(len(names)), names if axes is panels[0] else [""] * len(names), fontsize=8)
        axes.invert_yaxis()
        axes.axvline(1.0, color="#333333", linewidth=0.8)
        axes.set_xlim(0, 1.25 * max(high))
        axes.set_title(workload, fontsize=10)
    figure.supxlabel(f"speed-up over no speculation; {title}", fontsize=8)
    figure.savefig(path, dpi=110)
