"""The results of recipe.switch_bench as rows of a table, as text, and as bars, one panel for each workload."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sam.bench.verdict import median_interval
from sam.command import new_figure

COLORS = {"off": "#BBBBBB", "goodput": "#009E73", "ngram": "#D55E00", "suffix": "#E69F00"}
FIXED = "#0072B2"  # thresholds, and always


@dataclass
class Runs:
    """The runs of one variant on one workload: seconds and tail seconds of each, counts of the last."""

    seconds: list[float] = field(default_factory=list)
    tail: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    on_share: float = 0.0


def table(results: dict[str, dict[str, Runs]]) -> list[dict]:
    """One row for each workload and variant; ratios are of the same run: the first variant's seconds over this one's
    (`speedup`, the median), and this one's over goodput's (`goodput_gain`, the median and where it lies with 95 %)."""
    rows = []
    for workload, by_variant in results.items():
        base, goodput = next(iter(by_variant.values())), by_variant.get("goodput")
        for variant, runs in by_variant.items():
            ratios, tails = _ratios(base.seconds, runs.seconds), _ratios(base.tail, runs.tail)
            rows.append(
                {
                    "workload": workload,
                    "variant": variant,
                    "seconds": round(float(np.median(runs.seconds)), 3),
                    "speedup": round(float(np.median(ratios)), 3),
                    "tail_speedup": round(float(np.median(tails)), 3) if any(base.tail) else None,
                    "range": [round(min(ratios), 3), round(max(ratios), 3)],
                    "goodput_gain": median_interval(_ratios(runs.seconds, goodput.seconds)) if goodput else None,
                    "drafted": runs.drafted,
                    "accepted": runs.accepted,
                    "on_share": round(runs.on_share, 3),
                }
            )
    return rows


def _ratios(over: list[float], under: list[float]) -> list[float]:
    return [one / max(1e-9, other) for one, other in zip(over, under, strict=True)]


def as_text(rows: list[dict]) -> str:
    """Lay out the rows as text."""
    lines = [
        f"{'workload':10} {'variant':13} {'seconds':>8} {'speed-up':>9} {'(range)':>14} {'tail':>6} drafted accepted "
        "its seconds over goodput's (95 %)"
    ]
    for row in rows:
        low, high = row["range"]
        tail = f"{row['tail_speedup']:.2f}" if row["tail_speedup"] else ""
        gain = "{:.3f} ({:.3f}-{:.3f})".format(*row["goodput_gain"]) if row["goodput_gain"] else ""
        lines.append(
            f"{row['workload']:10} {row['variant']:13} {row['seconds']:8.2f} {row['speedup']:9.3f} "
            f"({low:.3f}-{high:.3f}) {tail:>6} {row['drafted']:7} {row['accepted']:8} {gain:>19}".rstrip()
        )
    return "\n".join(lines)


def plot(rows: list[dict], title: str, path: Path) -> None:
    """Draw the medians of `switch_bench.table`'s rows with the range over the runs; `title` says when they are from."""
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    figure = new_figure(3.1 * len(workloads), 3.4)
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
