"""The report's pictures: one function each, all runs in each, readable at 900 pixels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402

from recipe.report.runs import REWARD, Run, compare_responses  # noqa: E402
from recipe.report.timeline import draw_drafts, draw_step_time, median_step  # noqa: E402
from sam.replay.round_robin import Replay  # noqa: E402

# Okabe and Ito's colours, told apart by colour-blind readers.
COLOURS = {"sam": "#0072B2", "off": "#D55E00", "ngram": "#009E73", "suffix": "#CC79A7"}
STYLES = {"sam": "-", "off": "--", "ngram": "-.", "suffix": ":"}


def draw_all(runs: list[Run], threshold: int | None, scopes: dict[str, Replay], directory: Path) -> dict[str, str]:
    """Draw what the runs have recorded into `directory`; returns picture's name -> caption, in reading order."""
    captions = {}
    for name, (draw, caption, needs) in PICTURES.items():
        if having := [run for run in runs if needs(run)]:
            _save(directory / f"{name}.png", draw, having, threshold)
            captions[name] = caption.format(threshold=threshold)
    if len(runs) > 1 and all(run.has_responses for run in runs[:2]):
        _save(directory / "identical.png", _identical, runs, threshold)
        captions["identical"] = "Share of responses that are the same token for token in the first two runs."
    if not scopes:
        return captions
    _save(directory / "acceptance_by_scope.png", _acceptance_by_scope, scopes)
    captions["acceptance_by_scope"] = (
        "What sharing brings: the first run's responses replayed with a drafter for each sample (request) and one for "
        "all samples of a prompt (group), drafts never cut. In the legend the mean over all verify steps."
    )
    return captions


def _save(path: Path, draw: Callable, *what) -> None:
    figure, axes = plt.subplots(figsize=(7.5, 3.6), dpi=120)
    draw(axes, *what)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def _acceptance_by_scope(axes, scopes: dict[str, Replay]) -> None:
    for (scope, result), style in zip(scopes.items(), ("--", "-"), strict=True):
        mean = result.summary()["mean_acceptance_length"]
        axes.plot(*zip(*result.positions(), strict=True), style, marker="o", markersize=3, label=f"{scope}, {mean:.2f}")
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xlabel("position in the response (tokens)")
    axes.set_ylabel("mean acceptance length")
    axes.legend(frameon=False)


def _curve(key: str, label: str) -> Callable:
    def draw(axes, runs: list[Run], threshold: int) -> None:
        for run in runs:
            axes.plot(*run.series(key), label=run.name, color=_colour(run), linestyle=_style(run), linewidth=2)
        axes.set_xlabel("training step")
        axes.set_ylabel(label)
        axes.legend(frameon=False)

    return draw


def _accuracy(axes, runs: list[Run], threshold: int) -> None:
    _curve("rollout/acc_all/mean", "accuracy")(axes, runs, threshold)
    for run in runs:
        for key in sorted({key for row in run.metrics.values() for key in row if _is_validation_accuracy(key)}):
            axes.plot(
                *run.series(key),
                "o",
                color=_colour(run),
                markersize=6,
                markerfacecolor="none",
                label=f"{run.name}, validation",
            )
    axes.legend(frameon=False)


def _is_validation_accuracy(key: str) -> bool:
    return key.startswith("val-core/") and "/acc/mean" in key


def _rollout_time(axes, runs: list[Run], threshold: int) -> None:
    tails = [run.tail_seconds(run.steps, threshold) for run in runs]
    labels = ["rollout, total"] if None in tails else ["rollout, total", f"tail (at most {threshold} running)"]
    positions = np.arange(len(labels))
    width = 0.8 / len(runs)
    for index, (run, tail) in enumerate(zip(runs, tails, strict=True)):
        seconds = [run.seconds(run.steps), tail][: len(labels)]
        bars = axes.bar(positions + index * width, seconds, width * 0.92, color=_colour(run), label=run.name)
        axes.bar_label(bars, fmt="%.0f s", padding=2)
    axes.set_xticks(positions + width * (len(runs) - 1) / 2, labels)
    axes.set_ylabel("seconds, all steps")
    axes.margins(y=0.12)
    axes.legend(frameon=False)


def _acceptance_by_position(axes, runs: list[Run], threshold: int) -> None:
    for run in runs:
        starts, lengths = run.acceptance_by_position()
        if len(starts):
            axes.plot(
                starts,
                lengths,
                color=_colour(run),
                linestyle=_style(run),
                marker="o",
                markersize=3,
                label=run.name,
            )
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xlabel("position in the response (tokens)")
    axes.set_ylabel("mean acceptance length")
    axes.legend(frameon=False)


def _acceptance_by_draft_position(axes, runs: list[Run], threshold: int) -> None:
    for run in runs:
        rates = run.acceptance_by_draft_position()
        if len(rates):
            axes.plot(
                np.arange(1, len(rates) + 1),
                rates,
                color=_colour(run),
                linestyle=_style(run),
                marker="o",
                label=run.name,
            )
            axes.set_xticks(np.arange(1, len(rates) + 1))
    axes.set_ylim(0, 1)
    axes.set_xlabel("draft position")
    axes.set_ylabel("accepted / drafted")
    axes.legend(frameon=False)


def _timeline(axes, runs: list[Run], threshold: int) -> None:
    step = median_step(runs[0])
    for run in runs[:2]:
        if step not in run.steps:
            continue
        steps = run.engine_steps(step)
        time = np.cumsum(steps.step_ms) / 1e3
        axes.step(time, steps.running, where="pre", color=_colour(run), linestyle=_style(run), label=run.name)
        if threshold is not None:
            axes.fill_between(
                time, 0, steps.running, where=steps.in_tail(threshold), step="pre", color=_colour(run), alpha=0.15
            )
    if threshold is not None:
        axes.axhline(threshold, color="grey", linewidth=0.8, linestyle=":")
    axes.set_xlabel(f"seconds of rollout in training step {step}")
    axes.set_ylabel("running requests")
    axes.legend(frameon=False)


def _identical(axes, runs: list[Run], threshold: int) -> None:
    counts = compare_responses(runs[0], runs[1])
    shares = [same / total if total else 0.0 for same, total in counts.values()]
    axes.bar(list(counts), shares, color=COLOURS["sam"], width=0.7)
    axes.set_ylim(0, 1.05)
    axes.set_xlabel("training step")
    axes.set_ylabel(f"identical {runs[0].name}/{runs[1].name}")


def _colour(run: Run) -> str:
    return COLOURS.get(_method(run), "#555555")


def _style(run: Run) -> str:
    return STYLES.get(_method(run), "-")


def _method(run: Run) -> str:
    return run.name.split()[0]  # a second run of a method is "sam 2"


def _engine_steps(run: Run) -> bool:
    return run.has_engine_steps


def _rollout_seconds(run: Run) -> bool:
    return bool(run.steps)


def _metric(key: str) -> Callable[[Run], bool]:
    return lambda run: bool(run.series(key)[0])


# Name: what draws it, its caption, whether a run has what it needs.
PICTURES: dict[str, tuple[Callable, str, Callable[[Run], bool]]] = {
    "reward": (
        _curve(REWARD, "mean reward"),
        "Mean reward of all generated responses, before groups without signal are dropped. Lossless speculation "
        "means that the curves lie on each other.",
        _metric(REWARD),
    ),
    "accuracy": (
        _accuracy,
        "Share of right answers: lines are training responses, circles the held-out set (greedy).",
        _metric("rollout/acc_all/mean"),
    ),
    "response_length": (
        _curve("response_length/mean", "tokens"),
        "Mean length of the responses trained on.",
        _metric("response_length/mean"),
    ),
    "entropy": (
        _curve("actor/entropy", "nats per token"),
        "Entropy of the policy on the responses trained on.",
        _metric("actor/entropy"),
    ),
    "grad_norm": (
        _curve("actor/grad_norm", "gradient norm"),
        "Gradient norm before clipping.",
        _metric("actor/grad_norm"),
    ),
    "rollout_time": (
        _rollout_time,
        "Rollout time measured in the server, summed over the steps. The tail is the time "
        "from when at most {threshold} requests run to the end of a generation round.",
        _rollout_seconds,
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
    "acceptance_over_training": (
        _curve("rollout/spec_accept_length", "mean acceptance length"),
        "Tokens per verify step of a request (accepted plus bonus) in each training step; 1 is no gain.",
        _metric("rollout/spec_accept_length"),
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
