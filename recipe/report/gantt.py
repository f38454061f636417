"""Requests over time by replica: a line for each slot, from which one sees what ran where, moved, and ran last."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from recipe.report.picture import TIME, Picture
from recipe.report.runs import Run, left_out
from sam.command import new_figure
from sam.reading import json_rows, one_line

COLORS = {"probe": "#0072B2", "first": "#56B4E9", "again": "#BBDDEE", "moved": "#D55E00", "last": "#E69F00"}
LABELS = {
    "probe": "probe: its group's first",
    "first": "begins",
    "again": "goes on after a chunk",
    "moved": "goes on at another replica",
    "last": "ends among the last",
}
LOG_FILE = "routing.jsonl"  # as in recipe.rollout.router, which takes verl to import
LAST_SHARE = 0.05  # of the responses


class Span(NamedTuple):
    """A request's time at a replica: of a whole response, or of a chunk. Seconds since the rollout began."""

    request: int | str
    group: int | str
    replica: int | str
    start: float
    end: float


def kinds(spans: list[Span], has_probes: bool) -> list[str]:
    """A key of COLORS for each span, which are in the order of their starts."""
    ends: dict[int | str, float] = {}
    for span in spans:
        ends[span.request] = max(span.end, ends.get(span.request, 0.0))
    last = sorted(ends, key=ends.__getitem__)[len(ends) - max(1, round(LAST_SHARE * len(ends))) :]
    found, at, groups = [], {}, set()
    for span in spans:
        if span.request in at and at[span.request] != span.replica:
            kind = "moved"
        elif span.request in last:
            kind = "last"
        elif span.request in at:
            kind = "again"
        else:
            kind = "probe" if has_probes and span.group not in groups else "first"
        at[span.request] = span.replica
        groups.add(span.group)
        found.append(kind)
    return found


def lanes(spans: list[Span]) -> list[int]:
    """The slot of its replica in which each span is drawn: the lowest that is free; a request keeps its own."""
    free_from: dict[tuple, float] = {}
    own: dict[tuple, int] = {}
    found = []
    for span in spans:
        lane = own.get((span.replica, span.request))
        if lane is None or free_from[span.replica, lane] > span.start:
            lane = 0
            while free_from.get((span.replica, lane), -1.0) > span.start:
                lane += 1
        free_from[span.replica, lane] = span.end
        own[span.replica, span.request] = lane
        found.append(lane)
    return found


def spans_of_log(entries: Iterable[list]) -> list[list[Span]]:
    """The rollouts in a router's log (sam.routing.decision_log): from when requests come until none is there."""
    rollouts: list[list[Span]] = []
    groups: dict[str, str] = {}  # of the requests that are there
    running: dict[str, tuple[str, float]] = {}
    began = 0.0
    for now, name, *arguments in entries:
        if name == "arrive":
            if not groups:
                rollouts.append([])
                began = now
            groups[arguments[0]] = arguments[1]
        elif name == "decide":
            running |= {request: (replica, now) for request, replica, _ in arguments[1]}
        elif name in ("proceed", "finish", "abort"):
            if (request := arguments[0]) in running:
                replica, start = running.pop(request)
                rollouts[-1].append(Span(request, groups[request], replica, start - began, now - began))
            if name != "proceed":
                groups.pop(request, None)
    return rollouts


def picture_of_runs(runs: list[Run]) -> Picture | None:
    """Of each run with a router's log the rollout that took as long as most; None without one."""
    panels = []
    for run in runs:
        log = run.directory / LOG_FILE if run.directory else None
        if log and log.is_file():
            rollouts: list[list[Span]] = []
            with left_out(run.remarks), one_line(str(log), "not the log of a router"):
                entries = json_rows(log, lambda entry, _: entry, kind=list, is_growing=True)
                rollouts = sorted(filter(None, spans_of_log(entries)), key=lambda spans: max(one.end for one in spans))
            if rollouts:
                panels.append((run.name, rollouts[len(rollouts) // 2], True))
    if not panels:
        return None
    caption = "A line is a slot of a replica; a request begins when the router sends it. The median of all rollouts."
    return Picture("requests", TIME, "Requests by replica", caption, figure_of(panels))


def draw(panels: list[tuple[str, list[Span], bool]], path: Path) -> None:
    """Write the picture of `figure_of` to `path`, .png or .svg."""
    figure_of(panels).savefig(path, dpi=110)


def figure_of(panels: list[tuple[str, list[Span], bool]]):
    """Rollouts one above the other with one time axis.

    Args:
        panels: heading, spans, and whether its router sends probes.
    """
    figure = new_figure(9.5, 0.9 + 2.4 * len(panels))
    rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (heading, spans, has_probes) in zip(rows, panels, strict=True):
        spans = sorted(spans, key=lambda span: span.start)
        slots = lanes(spans)
        height = max(slots, default=0) + 2
        replicas = sorted({span.replica for span in spans})
        names = [f"replica {i}" for i in range(len(replicas))]
        for kind, color in COLORS.items():
            chosen = [i for i, one in enumerate(kinds(spans, has_probes)) if one == kind]
            places = [replicas.index(spans[i].replica) * height + slots[i] for i in chosen]
            widths = [spans[i].end - spans[i].start for i in chosen]
            left = [spans[i].start for i in chosen]
            axes.barh(places, widths, left=left, height=0.8, color=color, edgecolor="white", linewidth=0.3)
        axes.set_yticks([(i + 0.4) * height for i in range(len(replicas))], names)
        axes.set_title(heading, fontsize=9, loc="left")
        axes.invert_yaxis()
        axes.axvline(max((span.end for span in spans), default=0.0), color="#333333", linewidth=0.8)
    rows[-1].set_xlabel("seconds")
    rows[-1].set_xlim(left=0)
    from matplotlib.patches import Patch

    handles = [Patch(color=color, label=LABELS[kind]) for kind, color in COLORS.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=7, frameon=False)
    return figure
