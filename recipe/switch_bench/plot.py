"""Speed-ups of `recipe.switch_bench` as bars, one panel for each workload."""

from __future__ import annotations

from pathlib import Path

COLORS = {"off": "#BBBBBB", "goodput": "#009E73", "ngram": "#D55E00", "suffix": "#E69F00"}
FIXED = "#0072B2"  # thresholds, and always


def plot(rows: list[dict], title: str, path: Path) -> None:
    """Draw the medians of `switch_bench.table`'s rows with the range over the runs.

    Args:
        title: when and on what the figures were measured.
    """
    from matplotlib.figure import Figure

    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    figure = Figure(figsize=(3.1 * len(workloads), 3.4), layout="constrained")
    panels = figure.subplots(1, len(workloads), squeeze=False)[0]
    for axes, workload in zip(panels, workloads, strict=True):
        of_workload = [row for row in rows if row["workload"] == workload]
        for place, row in enumerate(of_workload):
            low, high = row["range"]
            middle = row["speedup"]
            axes.barh(
                place,
                middle,
                color=COLORS.get(row["variant"], FIXED),
                xerr=[[middle - low], [high - middle]],
                capsize=2,
            )
            axes.text(high, place, f" {middle:.2f}", va="center", fontsize=8)
        names = [row["variant"] for row in of_workload]
        axes.set_yticks(range(len(names)), names if axes is panels[0] else [""] * len(names), fontsize=8)
        axes.invert_yaxis()
        axes.axvline(1.0, color="#333333", linewidth=0.8)
        axes.set_xlim(0, 1.25 * max(row["range"][1] for row in of_workload))
        axes.set_title(workload, fontsize=10)
    figure.supxlabel(f"speed-up over no speculation; {title}", fontsize=8)
    figure.savefig(path, dpi=110)
