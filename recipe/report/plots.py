"""The report's pictures: one function each, small enough to stand side by side."""

from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from recipe.report.gantt import picture_of_runs
from recipe.report.picture import ACCEPTANCE, FIRST, TIME, TRAINING, Picture, Plot
from recipe.report.runs import REWARD, Run, compare_responses
from recipe.report.sources import draw_sources, has_sources
from recipe.report.stock import AgainstStock, draw_stock
from recipe.report.timeline import draw_drafts, draw_running, draw_step_time, label
from sam.bench.charts import COLORS
from sam.command import new_figure
from sam.replay.round_robin import Replay

# For a second run of a method, and for what is no method: Okabe and Ito's, which colour-blind readers tell apart.
SPARE_COLORS = ("#0072B2", "#CC79A7", "#56B4E9", "#B2182B", "#F0E442")
DASHES = {"off": "--", "ngram": "-.", "suffix": ":"}
POSITION = "position in the response (tokens)"
SIZE = (4.8, 3.0)  # inches
WIDE = (6.6, 3.1)


@dataclass(frozen=True)
class Looks:
    """What the pictures share: a colour for each run, by its name, and from how many requests on there is a tail."""

    colors: dict[str, str]
    threshold: int | None

    def line(self, axes, run: Run, x, y, **style) -> None:
        dashes = DASHES.get(run.name.split()[0], "-")  # a second run of a method is "sam 2"
        axes.plot(x, y, label=run.name, color=self.colors[run.name], linestyle=dashes, **style)


def colors_of(names: list[str]) -> dict[str, str]:
    """A method's own colour for its first run, a colour of its own for every other run.

    Example:
        >>> colors = colors_of(["sam", "off", "sam 2"])
        >>> len(set(colors.values()))
        3
    """
    others = [name for name in names if name not in COLORS]
    spare = {name: SPARE_COLORS[i % len(SPARE_COLORS)] for i, name in enumerate(others)}
    return {name: COLORS.get(name) or spare[name] for name in names}


def draw_all(
    runs: list[Run], threshold: int | None, scopes: dict[str, Replay], stock: AgainstStock | None
) -> list[Picture]:
    """What the runs have recorded, in reading order."""
    looks, pictures = Looks(colors_of([run.name for run in runs]), threshold), []

    def add(name: str, plot: Plot, *what) -> None:
        figure = new_figure(*(WIDE if name in ("drafts", "sources") else SIZE))
        axes = figure.subplots()
        more = plot.draw(axes, *what)
        axes.set_title(plot.title, loc="left", fontsize=10, fontweight="bold")
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        caption = plot.caption.format(threshold=threshold) + (f" {more}" if more else "")
        pictures.append(Picture(name, plot.part, plot.title, caption, figure))

    for name, plot in PLOTS.items():
        if having := [run for run in runs if plot.needs(run)]:
            add(name, plot, having, looks)
        if name == "drafts" and stock:
            add("stock", AGAINST_STOCK, stock)
    if gantt := picture_of_runs(runs):
        pictures.append(gantt)
    if all(run.has_responses for run in runs[:2]):
        add("identical", IDENTICAL, *runs[:2])
    if scopes:
        add("acceptance_by_scope", BY_SCOPE, scopes)
    return pictures


def _acceptance_by_scope(axes, scopes: dict[str, Replay]) -> None:
    for (scope, result), style, color in zip(scopes.items(), ("--", "-"), ("#999999", COLORS["sam"]), strict=True):
        mean = result.summary()["mean_acceptance_length"]
        places, lengths = zip(*result.positions(), strict=True)
        axes.plot(places, lengths, style, marker="o", markersize=3, color=color, label=f"{scope}, {mean:.2f}")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    label(axes, POSITION, "mean acceptance length")


def _accuracy(axes, runs: list[Run], looks: Looks) -> None:
    for run in runs:
        looks.line(axes, run, *run.series("rollout/acc_all/mean"), linewidth=2)
        for key in sorted({key for row in run.metrics.values() for key in row}):
            if key.startswith("val-core/") and "/acc/mean" in key:
                circles = {"color": looks.colors[run.name], "markersize": 6, "markerfacecolor": "none"}
                axes.plot(*run.series(key), "o", label=f"{run.name}, validation", **circles)
    label(axes, "training step", "share of right answers")


def _rollout_time(axes, runs: list[Run], looks: Looks) -> None:
    tails = [run.tail_seconds(run.steps, looks.threshold) for run in runs]
    labels = ["rollout"] if None in tails else ["rollout", f"its tail (at most {looks.threshold} running)"]
    positions = np.arange(len(labels))
    width = 0.8 / len(runs)
    for index, (run, tail) in enumerate(zip(runs, tails, strict=True)):
        seconds = [run.seconds(run.steps), tail][: len(labels)]
        color = looks.colors[run.name]
        bars = axes.bar(positions + index * width, seconds, width * 0.92, color=color, label=run.name)
        axes.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
    axes.set_xticks(positions + width * (len(runs) - 1) / 2, labels)
    axes.margins(y=0.12)
    label(axes, "", "seconds, all steps")


def _acceptance_by_position(axes, runs: list[Run], looks: Looks) -> None:
    for run in runs:
        starts, lengths = run.acceptance_by_position()
        if len(starts):
            looks.line(axes, run, starts, lengths, marker="o", markersize=3)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    label(axes, POSITION, "mean acceptance length")


def _acceptance_by_draft_position(axes, runs: list[Run], looks: Looks) -> None:
    for run in runs:
        rates = run.acceptance_by_draft_position()
        if len(rates):
            positions = np.arange(1, len(rates) + 1)
            looks.line(axes, run, positions, rates, marker="o")
            axes.set_xticks(positions)
    axes.set_ylim(0, 1)
    label(axes, "draft position", "accepted / drafted")


def _identical(axes, first: Run, second: Run) -> None:
    counts = compare_responses(first, second)
    shares = [same / total if total else 0.0 for same, total in counts.values()]
    axes.bar(list(counts), shares, color=COLORS["sam"], width=0.7)
    axes.set_ylim(0, 1.05)
    label(axes, "training step", f"identical in {first.name} and {second.name}", legend=False)


_engine_steps = attrgetter("has_engine_steps")


def _metric(key: str) -> Callable[[Run], bool]:
    return lambda run: bool(run.series(key)[0])


def _curve(part: str, title: str, key: str, unit: str, caption: str) -> Plot:
    """A metric over the training steps."""

    def draw(axes, runs: list[Run], looks: Looks) -> None:
        # The last run is drawn thin and on top, so that equal curves are seen to be several.
        for number, run in enumerate(runs):
            looks.line(axes, run, *run.series(key), linewidth=max(1.2, 5 - 2 * number), marker=".")
        label(axes, "training step", unit)

    return Plot(part, title, caption, draw, _metric(key))


# By name: what draws it, its caption, whether a run has what it needs.
PLOTS = {
    "drafts": Plot(
        FIRST,
        "Running requests, and the drafts verified and accepted",
        "One rollout, of median length, of the first run: requests that ran, and in each engine step the draft tokens "
        "that the switch let through and those of them that were accepted; and the same rollout of the second run.",
        draw_drafts,
        _engine_steps,
    ),
    "reward": _curve(
        FIRST, "Reward", REWARD, "mean reward",
        "Of all generated responses, before groups without signal are dropped. Lossless: the curves lie on each other.",
    ),
    "response_length": _curve(
        FIRST, "Response length", "response_length/mean", "tokens", "Mean of the responses trained on.",
    ),
    "accuracy": Plot(
        FIRST,
        "Accuracy",
        "Share of right answers: lines are training responses, circles the held-out set.",
        _accuracy,
        _metric("rollout/acc_all/mean"),
    ),
    "rollout_time": Plot(
        TIME,
        "Rollout in all of verl",
        "Measured in the server, summed over the steps. The tail is the time from when at most {threshold} requests "
        "run to the end of a generation round.",
        _rollout_time,
        attrgetter("steps"),
    ),
    "timeline": Plot(
        TIME,
        "Running requests",
        "One step's rollout (the one of median length); tails shaded.",
        draw_running,
        _engine_steps,
    ),
    "step_time": Plot(
        TIME,
        "Where an engine step's time went",
        "The first run's, over the same rollout.",
        draw_step_time,
        _engine_steps,
    ),
    "acceptance_over_training": _curve(
        ACCEPTANCE, "Over training", "rollout/spec_accept_length", "mean acceptance length",
        "Tokens per verify step of a request (accepted plus bonus) in each training step; 1 is no gain.",
    ),
    "draft_model": _curve(
        ACCEPTANCE, "The draft model over training", "rollout/spec_draft_model_accept_rate", "accepted / drafted",
        "Share of the draft model's tokens that the text has too, verified or not: it falls as the policy moves away.",
    ),
    "acceptance_by_position": Plot(
        ACCEPTANCE,
        "By position in the response",
        "Tokens per verify step of a request (accepted plus bonus) by where in the response it happened; 1 is no gain.",
        _acceptance_by_position,
        _engine_steps,
    ),
    "acceptance_by_draft": Plot(
        ACCEPTANCE,
        "By position in the draft",
        "How often the first, second, ... draft token is accepted.",
        _acceptance_by_draft_position,
        _engine_steps,
    ),
    "sources": Plot(
        ACCEPTANCE,
        "Where drafts came from",
        "Draft tokens of the first run by source, of one prompt in 32, verified or not; in the legend how many of "
        "a source's were right, over all steps.",
        draw_sources,
        has_sources,
    ),
    "entropy": _curve(
        TRAINING, "Entropy", "actor/entropy", "nats per token", "Of the policy on the responses trained on.",
    ),
    "grad_norm": _curve(TRAINING, "Gradient norm", "actor/grad_norm", "gradient norm", "Before clipping."),
}  # fmt: skip
AGAINST_STOCK = Plot(
    FIRST,
    "Engine alone, stock vLLM beside it",
    "Engines in turns on the first run's recorded text: median seconds of a round, with its range, and times stock.",
    draw_stock,
    None,
)
IDENTICAL = Plot(
    TRAINING,
    "Identical responses",
    "Share of responses that are the same token for token in the first two runs.",
    _identical,
    None,
)
BY_SCOPE = Plot(
    ACCEPTANCE,
    "What sharing brings",
    "The first run's responses replayed with a drafter for each sample (request) and one for all samples of a prompt "
    "(group), drafts never cut. In the legend the mean over all verify steps.",
    _acceptance_by_scope,
    None,
)
