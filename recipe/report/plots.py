"""The report's pictures: one function each, all runs in each, readable at 900 pixels."""

from collections.abc import Callable
from operator import attrgetter
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

from recipe.report.runs import REWARD, Run, compare_responses  # noqa: E402
from recipe.report.timeline import draw_drafts, draw_step_time, median_step  # noqa: E402
from sam.replay.round_robin import Replay  # noqa: E402

# Okabe and Ito's colours, told apart by colour-blind readers.
LOOKS = {"sam": ("#0072B2", "-"), "off": ("#D55E00", "--"), "ngram": ("#009E73", "-."), "suffix": ("#CC79A7", ":")}
POSITION = "position in the response (tokens)"


def draw_all(runs: list[Run], threshold: int | None, scopes: dict[str, Replay], directory: Path) -> dict[str, str]:
    """Draw what the runs have recorded into `directory`; returns picture's name -> caption, in reading order."""
    captions = {}
    for name, (draw, caption, needs) in PICTURES.items():
        if having := [run for run in runs if needs(run)]:
            _save(directory / f"{name}.png", draw, having, threshold)
            captions[name] = caption.format(threshold=threshold)
    if all(run.has_responses for run in runs[:2]):
        _save(directory / "identical.png", _identical, *runs[:2])
        captions["identical"] = "Share of responses that are the same token for token in the first two runs."
    if scopes:
        _save(directory / "acceptance_by_scope.png", _acceptance_by_scope, scopes)
        captions["acceptance_by_scope"] = (
            "What sharing brings: the first run's responses replayed with a drafter for each sample (request) and one "
            "for all samples of a prompt (group), drafts never cut. In the legend the mean over all verify steps."
        )
    return captions


def _save(path: Path, draw: Callable, *what) -> None:
    figure, axes = plt.subplots(figsize=(7.5, 3.6), dpi=120)
    draw(axes, *what)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _label(axes, x: str, y: str) -> None:
    axes.set(xlabel=x, ylabel=y)
    axes.legend(frameon=False)


def _look(run: Run) -> tuple[str, str]:
    """Colour and line style, by its method."""
    return LOOKS.get(run.name.split()[0], ("#555555", "-"))  # a second run of a method is "sam 2"


def _line(axes, run: Run, x, y, **style) -> None:
    colour, dashes = _look(run)
    axes.plot(x, y, label=run.name, color=colour, linestyle=dashes, **style)


def _acceptance_by_scope(axes, scopes: dict[str, Replay]) -> None:
    for (scope, result), style in zip(scopes.items(), ("--", "-"), strict=True):
        mean = result.summary()["mean_acceptance_length"]
        axes.plot(*zip(*result.positions(), strict=True), style, marker="o", markersize=3, label=f"{scope}, {mean:.2f}")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    _label(axes, POSITION, "mean acceptance length")


def _accuracy(axes, runs: list[Run], threshold: int) -> None:
    for run in runs:
        _line(axes, run, *run.series("rollout/acc_all/mean"), linewidth=2)
        for key in sorted({key for row in run.metrics.values() for key in row}):
            if key.startswith("val-core/") and "/acc/mean" in key:
                circles = {"color": _look(run)[0], "markersize": 6, "markerfacecolor": "none"}
                axes.plot(*run.series(key), "o", label=f"{run.name}, validation", **circles)
    _label(axes, "training step", "accuracy")


def _rollout_time(axes, runs: list[Run], threshold: int) -> None:
    tails = [run.tail_seconds(run.steps, threshold) for run in runs]
    labels = ["rollout, total"] if None in tails else ["rollout, total", f"tail (at most {threshold} running)"]
    positions = np.arange(len(labels))
    width = 0.8 / len(runs)
    for index, (run, tail) in enumerate(zip(runs, tails, strict=True)):
        seconds = [run.seconds(run.steps), tail][: len(labels)]
        bars = axes.bar(positions + index * width, seconds, width * 0.92, color=_look(run)[0], label=run.name)
        axes.bar_label(bars, fmt="%.0f s", padding=2)
    axes.set_xticks(positions + width * (len(runs) - 1) / 2, labels)
    axes.margins(y=0.12)
    _label(axes, "", "seconds, all steps")


def _acceptance_by_position(axes, runs: list[Run], threshold: int) -> None:
    for run in runs:
        starts, lengths = run.acceptance_by_position()
        if len(starts):
            _line(axes, run, starts, lengths, marker="o", markersize=3)
    axes.axhline(1.0, color="grey", linewidth=0.8)
    _label(axes, POSITION, "mean acceptance length")


def _acceptance_by_draft_position(axes, runs: list[Run], threshold: int) -> None:
    for run in runs:
        rates = run.acceptance_by_draft_position()
        if len(rates):
            positions = np.arange(1, len(rates) + 1)
            _line(axes, run, positions, rates, marker="o")
            axes.set_xticks(positions)
    axes.set_ylim(0, 1)
    _label(axes, "draft position", "accepted / drafted")


def _timeline(axes, runs: list[Run], threshold: int) -> None:
    step = median_step(runs[0])
    for run in runs[:2]:
        if step not in run.steps:
            continue
        steps = run.engine_steps(step)
        time = np.cumsum(steps.step_ms) / 1e3
        _line(axes, run, time, steps.running, drawstyle="steps-pre")
        if threshold is not None:
            shaded = {"where": steps.in_tail(threshold), "step": "pre", "color": _look(run)[0], "alpha": 0.15}
            axes.fill_between(time, 0, steps.running, **shaded)
    if threshold is not None:
        axes.axhline(threshold, color="grey", linewidth=0.8, linestyle=":")
    _label(axes, f"seconds of rollout in training step {step}", "running requests")


def _identical(axes, first: Run, second: Run) -> None:
    counts = compare_responses(first, second)
    shares = [same / total if total else 0.0 for same, total in counts.values()]
    axes.bar(list(counts), shares, color=LOOKS["sam"][0], width=0.7)
    axes.set(ylim=(0, 1.05), xlabel="training step", ylabel=f"identical {first.name}/{second.name}")


_engine_steps = attrgetter("has_engine_steps")


def _metric(key: str) -> Callable[[Run], bool]:
    return lambda run: bool(run.series(key)[0])


def _curve(key: str, label: str, caption: str) -> tuple[Callable, str, Callable[[Run], bool]]:
    """An entry of PICTURES: a metric over the training steps."""

    def draw(axes, runs: list[Run], threshold: int) -> None:
        for run in runs:
            _line(axes, run, *run.series(key), linewidth=2)
        _label(axes, "training step", label)

    return draw, caption, _metric(key)


# Name: what draws it, its caption, whether a run has what it needs.
PICTURES: dict[str, tuple[Callable, str, Callable[[Run], bool]]] = {
    "reward": _curve(
        REWARD,
        "mean reward",
        "Mean reward of all generated responses, before groups without signal are dropped. Lossless speculation "
        "means that the curves lie on each other.",
    ),
    "accuracy": (
        _accuracy,
        "Share of right answers: lines are training responses, circles the held-out set (greedy).",
        _metric("rollout/acc_all/mean"),
    ),
    "response_length": _curve("response_length/mean", "tokens", "Mean length of the responses trained on."),
    "entropy": _curve("actor/entropy", "nats per token", "Entropy of the policy on the responses trained on."),
    "grad_norm": _curve("actor/grad_norm", "gradient norm", "Gradient norm before clipping."),
    "rollout_time": (
        _rollout_time,
        "Rollout time measured in the server, summed over the steps. The tail is the time "
        "from when at most {threshold} requests run to the end of a generation round.",
        attrgetter("steps"),
    ),
    "timeline": (
        _timeline,
        "Running requests over one step's rollout (the one of median length); tails shaded.",
        _engine_steps,
    ),
    "drafts": (
        draw_drafts,
        "The first run's rollout of that step: requests that ran, and in each engine step the draft tokens that the "
        "switch let through and those of them that were accepted.",
        _engine_steps,
    ),
    "step_time": (
        draw_step_time,
        "Where an engine step's time went, and what verifying rejected drafts took: least squares of the time over "
        "requests and draft tokens.",
        _engine_steps,
    ),
    "acceptance_over_training": _curve(
        "rollout/spec_accept_length",
        "mean acceptance length",
        "Tokens per verify step of a request (accepted plus bonus) in each training step; 1 is no gain.",
    ),
    "acceptance_by_position": (
        _acceptance_by_position,
        "Tokens per verify step of a request (accepted plus bonus) by where in the response it happened; 1 is no gain.",
        _engine_steps,
    ),
    "acceptance_by_draft": (
        _acceptance_by_draft_position,
        "How often the first, second, ... draft token is accepted.",
        _engine_steps,
    ),
}
