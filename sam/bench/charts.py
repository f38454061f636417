"""The picture of a measurement: each variant's speed by load."""

from typing import Any

import numpy as np

from sam.bench.settings import SAM, STOCK_DRAFTERS, STOCK_V1, Settings
from sam.command import new_figure

COLORS = {
    "stock": "#333333", "off": "#999999", "sam": "#009E73", "ngram": "#D55E00", "suffix": "#E69F00",
    "draft_model": "#8C510A", "hybrid": "#6A3D9A", "eagle3": "#882255",
}  # fmt: skip
SAM_COLORS = ("#56B4E9", "#0072B2", "#CC79A7")


def color_of(variant: str) -> str:
    """A variant's color, the same in all pictures."""
    if variant in COLORS:
        return COLORS[variant]
    if variant == STOCK_V1:
        return "#999933"
    if variant in STOCK_DRAFTERS:
        return COLORS[STOCK_DRAFTERS[variant].partition("_")[0]]
    fixed, paths = SAM.fullmatch(variant).groups()
    return SAM_COLORS[(int(fixed or 0) + int(paths or 0)) % len(SAM_COLORS)]


def ratios(rows: list[dict[str, Any]], settings: Settings):
    """Each variant's ratio by load, with its range."""
    figure = new_figure(6.0, 3.4)
    axes = figure.subplots()
    variants = [variant for variant in settings.variants if variant != settings.reference]
    for number, variant in enumerate(variants):
        of_variant = [row for row in rows if row["variant"] == variant]
        places = [settings.requests.index(row["requests"]) for row in of_variant]
        middle, low, high = (np.array([row[name] for row in of_variant]) for name in ("ratio", "low", "high"))
        shifted = np.array(places) + 0.12 * (number - (len(variants) - 1) / 2)
        around = np.clip([middle - low, high - middle], 0, None)
        axes.errorbar(shifted, middle, around, fmt="o", capsize=3, color=color_of(variant), label=variant)
    axes.axhline(1.0, color=color_of(settings.reference), linewidth=0.8)
    axes.set_xticks(range(len(settings.requests)), map(str, settings.requests))
    axes.set_xlim(-0.5, len(settings.requests) - 0.5)
    axes.set_xlabel("requests that start together")
    axes.set_ylabel(f"speed over {settings.reference}")
    axes.legend(fontsize=8)
    return figure
