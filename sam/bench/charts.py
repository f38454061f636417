"""Pictures of a measurement: the ratio by load, what a step costs, running requests over time."""

from typing import Any

import numpy as np

from sam.bench.settings import SAM, STOCK_V1, Settings, is_stock
from sam.bench.verdict import in_requests
from sam.command import new_figure

COLORS = {
    "stock": "#333333", "off": "#999999", "sam": "#009E73", "ngram": "#D55E00", "suffix": "#E69F00",
    "draft_model": "#8C510A", "hybrid": "#6A3D9A", "eagle3": "#882255",
}  # fmt: skip
SAM_COLORS = ("#56B4E9", "#0072B2", "#CC79A7")
MEANS = 80
SIZE = (4.6, 3.1)  # inches; a page sets several side by side
Recorded = dict[tuple[int, str], list[dict[str, Any]]]  # what happened step by step in each batch, by load and variant


def color_of(variant: str) -> str:
    """A variant's color, the same in all pictures."""
    if variant in COLORS:
        return COLORS[variant]
    if is_stock(variant):
        return "#999933" if variant == STOCK_V1 else color_of(variant.split("-")[1].partition("_")[0])
    fixed, paths = SAM.fullmatch(variant).groups()
    return SAM_COLORS[(int(fixed or 0) + int(paths or 0)) % len(SAM_COLORS)]


def ratios(rows: list[dict[str, Any]], settings: Settings):
    """Each variant's ratio by load, with its range."""
    figure = new_figure(*SIZE)
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


def step_costs(recorded: Recorded):
    """Median milliseconds of a step by the tokens that it took through the model; None without such steps."""
    figure = new_figure(*SIZE)
    axes = figure.subplots()
    drawn = False
    for variant in dict.fromkeys(variant for _, variant in recorded):
        batches = [batch for (_, its), batches in recorded.items() if its == variant for batch in batches]
        pairs = [_tokens_and_ms(batch) for batch in batches]
        tokens, ms = (np.concatenate(column) for column in zip(*pairs, strict=True))
        if not len(tokens):
            continue
        known = np.unique(tokens)
        medians = [np.median(ms[tokens == count]) for count in known]
        axes.plot(known, medians, ".-", markersize=4, linewidth=0.9, color=color_of(variant), label=variant)
        drawn = True
    axes.set_xlabel("tokens in a step: requests and their drafts")
    axes.set_ylabel("milliseconds, median")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8)
    return figure if drawn else None


def _tokens_and_ms(batch: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens through the model and milliseconds of each step of a batch without prompts."""
    if (columns := batch.get("columns")) is not None:
        keep = np.array(columns["prefilling"], dtype=int) == 0
        keep[:1] = False  # from the first request's arrival
        tokens = np.array(columns["running"], dtype=int) + np.array(columns["drafted"], dtype=int)
        return tokens[keep], np.array(columns["step_ms"], dtype=float)[keep]
    ends, unfinished = np.array(batch["ends"], dtype=float), np.array(batch["unfinished"], dtype=int)
    # The step behind the end before; with the first one the prompts are computed.
    return unfinished[:-1], np.diff(ends) * 1e3


def running(recorded: Recorded, requests: int):
    """Unfinished requests over time at one load, batch after batch."""
    figure = new_figure(*SIZE)
    axes = figure.subplots()
    for (load, variant), batches in recorded.items():
        if load == requests:
            ends, unfinished = _unfinished(batches, requests)
            style = "--" if is_stock(variant) else "-"
            axes.step(ends, unfinished, style, where="post", linewidth=1.2, color=color_of(variant), label=variant)
    _over_time(axes, "unfinished requests", f"at {in_requests(requests)}")
    return figure


def _unfinished(batches: list[dict[str, Any]], requests: int) -> tuple[list[float], list[int]]:
    """Seconds, and the unfinished requests from then on; a batch starts when the one before has ended."""
    seconds, unfinished = [], []
    for batch in batches:
        start = seconds[-1] if seconds else 0.0
        seconds += [start, *(start + end for end in batch["ends"])]
        unfinished += [requests, *batch["unfinished"]]
    return seconds, unfinished


def drafts(batches: list[dict[str, Any]], requests: int, variant: str):
    """Draft tokens verified in a step of one run, and how many of them were accepted; None without drafts.

    Where there are more than MEANS steps, means of as many spans of steps.
    """
    drafted = _column(batches, "drafted")
    if not drafted.any():
        return None
    figure = new_figure(*SIZE)
    axes = figure.subplots()
    seconds = np.cumsum(_column(batches, "step_ms")) / 1e3
    spans = np.array_split(np.arange(len(seconds)), min(MEANS, len(seconds)))
    ends = [seconds[span[-1]] for span in spans]
    accepted = _column(batches, "accepted")
    for label, tokens, color in (("verified", drafted, "#cccccc"), ("accepted", accepted, color_of(variant))):
        means = [np.mean(tokens[span]) for span in spans]
        axes.fill_between([0.0, *ends], [means[0], *means], step="pre", color=color, linewidth=0, label=label)
    _over_time(axes, "draft tokens in a step", f"{variant} at {in_requests(requests)}")
    return figure


def _column(batches: list[dict[str, Any]], name: str) -> np.ndarray:
    """A value of each step of all batches; empty for stock."""
    return np.concatenate([batch.get("columns", {}).get(name, []) for batch in batches])


def _over_time(axes, label: str, title: str) -> None:
    axes.set_xlabel("seconds")
    axes.set_ylabel(label)
    axes.set_title(title, fontsize=9)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.legend(fontsize=8)
