"""`sam report RUN_SAM RUN_OFF [RUN ...]`: two runs compared, on one HTML page and as JSON.

The first run speculates, the second is the baseline; more runs are peers shown beside them. A run is a run directory.
"""

import json
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sam.bench.result import GO, table_of, times
from sam.command import Parser, run_command
from sam.page import Picture, Section, page, picture
from sam.record.engine_steps import EngineSteps
from sam_recipe.record import differences
from sam_recipe.report.runs import (
    MEASURE,
    ROLLOUT_SECONDS,
    TAIL_SECONDS,
    Run,
    common_steps,
    compare_responses,
    load_runs,
    load_stock,
    method_of,
    rows_of,
    stock_summary,
)

TITLE = "Does speculation pay?"
NOT_RECORDED = "not recorded"
STEPS_AT_AN_END = 3  # the reward's gain is that of the last steps' mean over the first steps'
SIGNIFICANT = 0.05
RESAMPLES = 10_000


class Curve(NamedTuple):
    """A metric over the training steps; `part` of the page where it is drawn, the first without a heading."""

    part: str
    name: str
    key: str
    unit: str
    caption: str


REWARD = Curve("", "reward", "rollout/reward_all/mean", "mean reward", "Of all responses, those of dropped groups too.")
LENGTH = Curve("", "response length", "response_length/mean", "tokens", "Mean of the responses trained on.")
ACCURACY = Curve("", "accuracy", "rollout/acc_all/mean", "share of right answers", "Circles: the held-out set.")
ACCEPTED = Curve("Acceptance", "over training", "rollout/spec_accept_length", "mean acceptance length", "1 is no gain.")
LEARNT = tuple(
    Curve("Training", *of)
    for of in (
        ("reward, groups trained on", "critic/score/mean", "mean reward", "Of the responses trained on."),
        ("entropy", "actor/entropy", "nats per token", "Of the policy on the responses trained on."),
        ("gradient norm", "actor/grad_norm", "gradient norm", "Before clipping."),
    )
)
COMPARED = (REWARD, ACCURACY, LENGTH, *LEARNT)
AGREEMENT_HEADER = (
    "curve", "steps", "first, mean", "second, mean", "difference, mean ± standard error", "largest in a step", "p",
    "verdict",
)  # fmt: skip
PHASE_HEADER = (
    "seconds a step", "steps with it", "first", "second", "saved, of the second", "saved, of the first (as published)",
)  # fmt: skip

LOOK = {
    "font.size": 8, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.labelsize": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
}  # fmt: skip
COLORS = ("#009E73", "#999999", "#D55E00", "#E69F00", "#0072B2", "#CC79A7")  # of the runs, in turn; Okabe and Ito's
DASHES = ("-", "--", "-.", ":")
SIZE, WIDE = (4.8, 3.0), (6.6, 3.1)  # inches; the first picture is as wide as two
POINTS = 120  # of a curve over time
RUNNING = "Running requests, and the drafts verified and accepted"
RUNNING_CAPTION = (
    "A rollout of median length: requests that ran and, in each of the first run's engine steps, the draft tokens that "
    "the switch let through and those of them that were accepted."
)
Labels = tuple[str, str] | None  # of the axes; None: there is nothing to see


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="sam report", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run directories: speculating, baseline, peers")
    parser.add_argument("--output", type=Path, help="where to write; by default the first run directory's parent")
    options = parser.parse_args(arguments)
    if len(options.runs) < 2:
        parser.error("two runs are compared: give a speculating run and a baseline")
    return run_command(lambda: report(options.runs, options.output))


def report(directories: list[Path], output: Path | None) -> str:
    """Write report.html and summary.json into `output`; returns what is printed."""
    runs = load_runs(directories)
    output = output or runs[0].directory.parent
    against, note = load_stock(output, runs[0])
    summary = summarize(runs) | {"stock": against and stock_summary(against), "stock_note": note}
    output.mkdir(parents=True, exist_ok=True)
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    (output / "report.html").write_text(as_html(runs, summary, against))
    values = [f"{name:<24}{value}" for name, value in facts(summary)]
    notes = (f"note: {line}" for line in remarks(runs, summary))
    return "\n".join([*answer(summary, against), *values, *notes, f"report: {output / 'report.html'}"])


def as_html(runs: list[Run], summary: dict, against: dict | None) -> str:
    """The page: the answer, the pictures, then the tables that have rows."""
    first, second = runs[:2]
    differing = differences(first.config, second.config).items()
    tables = {
        "Figures": (("figure", "value"), facts(summary)),
        "What to know of these figures": (("note",), [(line,) for line in remarks(runs, summary)]),
        "Engines alone, on the recorded text": table_of(against) if against else ((), ()),
        "Whether the curves agree": (AGREEMENT_HEADER, agreement(first, second)),
        "Seconds of each phase": (PHASE_HEADER, phases(first, second)),
        "What differs between the two configs": (("key", "first", "second"), [(k, *v) for k, v in differing]),
        "Versions": (("package", "version"), list(first.versions.items())),
    }
    sections = [Section(part, pictures) for part, pictures in draw_all(runs).items()]
    sections += [Section(title, table=table) for title, table in tables.items() if table[1]]
    return page(TITLE, answer(summary, against), sections)


def summarize(runs: list[Run]) -> dict:
    """The figures of summary.json; the first run speculates, the second is the baseline. None is: not recorded."""
    first, second = runs[:2]
    steps, threshold = common_steps(first, second), first.threshold()
    identical = compare_responses(first, second)
    accept_length, accept_rate = first.acceptance()

    def tail_seconds(run: Run, steps: list[int]) -> float | None:
        return run.seconds(steps, TAIL_SECONDS) if threshold is not None and run.threshold() == threshold else None

    return {
        "rollout_speedup_total": _over(second.seconds(steps), first.seconds(steps)),
        "rollout_speedup_tail": _over(tail_seconds(second, steps), tail_seconds(first, steps)),
        "accept_length": accept_length,
        "accept_rate": accept_rate,
        "accept_length_by_turn": EngineSteps.turn_lengths(first.recorded.values()),
        "reward_gain_sam": _gain(first),
        "reward_gain_off": _gain(second),
        "identical_responses": sum(same for same, _ in identical.values()) if identical else None,
        "total_responses": sum(total for _, total in identical.values()),
        "identical_by_step": {str(step): list(counts) for step, counts in identical.items()},
        "steps": len(steps),
        "tail_threshold": threshold,
        "seconds": {
            run.name: {
                "rollout": run.seconds(run.steps),
                "tail": tail_seconds(run, run.steps),
                "training": float(sum(run.series("timing_s/step")[1])),
            }
            for run in runs
        },
        "versions": first.versions,
        "runs": [str(run.directory) for run in runs],
        "agreement": {
            row[0]: dict(zip(AGREEMENT_HEADER[1:], row[1:], strict=True)) for row in agreement(first, second)
        },
    }


def _over(theirs: float | None, its: float | None) -> float | None:
    return theirs / its if its and theirs is not None else None


def _gain(run: Run) -> float | None:
    rewards = run.series(REWARD.key)[1]
    return float(np.mean(rewards[-STEPS_AT_AN_END:]) - np.mean(rewards[:STEPS_AT_AN_END])) if rewards else None


def answer(summary: dict, against: dict | None) -> list[str]:
    """What the report says, in a few lines; the first is the headline. `against`: what stock.json holds, or None."""
    first, second = list(summary["seconds"])[:2]
    seconds = [summary["seconds"][name]["rollout"] for name in (second, first)]
    in_verl = f"{_figure(summary, '{:.2f}x', 'rollout_speedup_total')} speculation={second}"
    in_verl += f" ({seconds[0]:.1f} s to {seconds[1]:.1f} s in {summary['steps']} steps)"
    if against:
        method, rows = method_of(against), rows_of(against)
        row = rows[method]
        doubt = "" if row["answer"] == GO else f": {row['answer']}"
        lines = [
            f"Rollout {times(row)} as fast as stock vLLM{doubt}",
            f"Engines alone, the same text: stock, off and {method} take turns at emitting this run's recorded "
            f"responses ({row['rounds']} rounds of {row['requests']} requests); without drafts (off) "
            f"{times(rows['off'])}.",
            f"In all of verl, where stock vLLM cannot train on a CPU: {in_verl}.",
        ]
    else:
        lines = [f"Rollout {in_verl}", f"Stock vLLM was not measured ({MEASURE})."]
    same = _figure(summary, "{} of {}", "identical_responses", "total_responses")
    with_both = f" responses identical, token for token, with speculation={first} and {second}."
    lines.append("Identical responses: not recorded." if same == NOT_RECORDED else same + with_both)
    rows = {curve.name: summary["agreement"].get(curve.name) for curve in (REWARD, LENGTH)}
    curves = ", ".join(f"{name}: {row['verdict']}, p {row['p']}" for name, row in rows.items() if row)
    return [*lines, f"Curves (paired test): {curves or NOT_RECORDED}."]


def facts(summary: dict) -> list[tuple[str, str]]:
    """Name and value of what a reader looks for next."""
    seconds = ", ".join(f"{name} {its['rollout']:.0f}" for name, its in summary["seconds"].items())
    gains = "{:+.3f} against {:+.3f} (last three steps over first three)"
    by_turn = ", ".join(f"{length:.2f}" for length in summary["accept_length_by_turn"].values())
    return [
        ("rollout speed-up, tail", _figure(summary, "{:.2f}x (at most {} running)", "rollout_speedup_tail",
                                           "tail_threshold")),
        ("mean acceptance length", _figure(summary, "{:.2f}", "accept_length")),
        *([("by turn (first replica)", by_turn)] if by_turn else []),
        ("acceptance rate", _figure(summary, "{:.2f}", "accept_rate")),
        ("reward gain", _figure(summary, gains, "reward_gain_sam", "reward_gain_off")),
        ("rollout seconds", seconds),
    ]  # fmt: skip


def _figure(summary: dict, form: str, *keys: str) -> str:
    values = [summary[key] for key in keys]
    return form.format(*values) if all(value is not None and np.isfinite(value) for value in values) else NOT_RECORDED


def remarks(runs: list[Run], summary: dict) -> list[str]:
    """A line for each part that is left out or read in another way than usual, and why."""
    sources = ", ".join(str(run.directory) for run in runs if not run.recorded)  # reading them may add a remark
    lines = [remark for run in runs for remark in run.remarks]
    lines += [summary["stock_note"]] if summary["stock_note"] else []
    if sources:
        lines.append(f"no engine steps in {sources}: running requests over time left out")
    if sources := ", ".join(str(run.directory) for run in runs[:2] if not run.has_responses):
        lines.append(f"no responses in {sources}: identical responses left out")
    if summary["rollout_speedup_tail"] is None:
        lines.append(f"the tail is left out: not {TAIL_SECONDS} of one batch_size_threshold in both runs, or no tail")
    if runs[0].name == "off":
        lines.append("the first run has speculation off: name the run that speculates first, the baseline second")
    return lines


def sign_flip_p_value(differences: np.ndarray) -> float:
    """Two-sided permutation test that the mean of paired differences, float [pairs], is zero; 1.0 where all are.

    Under the hypothesis each difference is as likely with the other sign (Fisher's randomisation test). The smallest
    value that n pairs can give is about 2 / 2**n.
    """
    if not differences.any():
        return 1.0
    signs = np.random.default_rng(0).choice((-1.0, 1.0), (RESAMPLES, len(differences)))
    extreme = np.abs((signs * differences).mean(1)) >= abs(differences.mean()) - 1e-12
    return float((1 + extreme.sum()) / (1 + RESAMPLES))


def _pairs(first: Run, second: Run, key: str) -> np.ndarray:
    """float [steps, 2]: the values of the training steps that both runs have."""
    steps = [step for step in common_steps(first, second) if all(key in run.metrics[step] for run in (first, second))]
    return np.stack([first.column(key, steps), second.column(key, steps)], axis=1).reshape(-1, 2)


def agreement(first: Run, second: Run) -> list[tuple]:
    """One row for each curve that both runs have, as AGREEMENT_HEADER; p of a paired test of the steps' differences."""
    rows = []
    for curve in COMPARED:
        if len(pairs := _pairs(first, second, curve.key)):
            difference = pairs[:, 0] - pairs[:, 1]
            p = sign_flip_p_value(difference)
            verdict = "equal" if not difference.any() else "no difference found" if p >= SIGNIFICANT else "different"
            spread = f"{difference.mean():+.2g}"
            if len(pairs) > 1:
                spread += f" ± {difference.std(ddof=1) / np.sqrt(len(pairs)):.2g}"
            means = [f"{value:.4g}" for value in pairs.mean(0)]
            largest = f"{np.abs(difference).max():.2g}"
            rows.append((curve.name, len(pairs), *means, spread, largest, f"{p:.3f}", verdict))
    return rows


def phases(first: Run, second: Run) -> list[tuple]:
    """One row for each timed phase of both runs, longest first, as PHASE_HEADER.

    The tail and the generation rounds of dynamic sampling, of the steps that had them in both runs, are phases of their
    own. The published tables give (second - first) / first: 4159 s to 3793 s are their -9.6 %, of the second 8.8 %.
    """
    names = {ROLLOUT_SECONDS: "rollout"}
    if first.threshold() == second.threshold():  # else tails are not the same
        names[TAIL_SECONDS] = "tail of the rollout"
    for key in {key for run in (first, second) for row in run.metrics.values() for key in row}:
        phase, _, name = key.rpartition("/")
        if phase == "timing_s":
            names.setdefault(key, name)
        elif phase == "rollout/round_seconds":
            names[key] = f"generation round {name}" if name.isdigit() else "generation round, mean of the replicas"
    rows = []
    for key, name in names.items():
        pairs = _pairs(first, second, key)
        if len(pairs) and pairs.mean() >= 0.01:
            on, off = pairs.mean(0).tolist()
            saved = (f"{100 * (off - on) / whole:.2f} %" if whole else "" for whole in (off, on))
            rows.append((off, (name, len(pairs), f"{on:.2f}", f"{off:.2f}", *saved)))
    return [row for _, row in sorted(rows, key=lambda pair: -pair[0])]


def draw_all(runs: list[Run]) -> dict[str, list[Picture]]:
    """What the runs have recorded, by part of the page."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    found: dict[str, list[Picture]] = {}
    styled = [
        (run, {"label": run.name, "color": COLORS[n % len(COLORS)], "linestyle": DASHES[n % len(DASHES)]})
        for n, run in enumerate(runs)
    ]
    curves = ((one, partial(_curve, one)) for one in (REWARD, LENGTH, ACCURACY, ACCEPTED, *LEARNT))
    drawn = [("", RUNNING, RUNNING_CAPTION, _drafts)]
    drawn += [(one.part, one.name[0].upper() + one.name[1:], one.caption, draw) for one, draw in curves]
    with rc_context(LOOK):
        for part, title, caption, draw in drawn:
            figure = Figure(figsize=SIZE if found else WIDE, layout="constrained")
            axes = figure.subplots()
            if (labels := draw(axes, styled)) is not None:
                axes.set(xlabel=labels[0], ylabel=labels[1], title=title)
                axes.legend()
                found.setdefault(part, []).append(picture(figure, title, caption))
    return found


def over_time(steps: EngineSteps, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Ends of equal spans of time, float [POINTS] seconds, and a column's means in them by the steps' duration."""
    milliseconds = steps.step_ms.astype(np.float64)
    ends, sums = (np.cumsum([0.0, *values]) for values in (milliseconds, getattr(steps, name) * milliseconds))
    edges = np.linspace(0.0, ends[-1], POINTS + 1)
    return edges[1:] / 1e3, np.diff(np.interp(edges, ends, sums)) / np.diff(edges)


def _drafts(axes, runs: list[tuple[Run, dict]]) -> Labels:
    first = runs[0][0]
    if not first.recorded:
        return None
    ordered = sorted(first.steps, key=lambda step: first.metrics[step][ROLLOUT_SECONDS])
    steps = first.recorded[step := ordered[len(ordered) // 2]]
    axes.fill_between(*over_time(steps, "drafted"), color="#D55E00", alpha=0.35, label="draft tokens verified, a step")
    axes.fill_between(*over_time(steps, "accepted"), color="#009E73", alpha=0.8, label="accepted, a step")
    for run, style in runs:
        if step in run.recorded:
            style = style | {"color": "#222222", "label": f"running requests, {run.name}"}
            axes.plot(*over_time(run.recorded[step], "running"), **style)
    axes.set_ylim(0)
    return f"seconds of rollout in training step {step}", "running requests, or tokens"


def _curve(curve: Curve, axes, runs: list[tuple[Run, dict]]) -> Labels:
    having = [(run, style) for run, style in runs if run.series(curve.key)[0]]
    # The last run is drawn thin and on top, so that equal curves are seen to be several.
    for number, (run, style) in enumerate(having):
        axes.plot(*run.series(curve.key), linewidth=max(1.2, 5 - 2 * number), marker=".", **style)
        for key in sorted({key for row in run.metrics.values() for key in row}) if curve == ACCURACY else ():
            if key.startswith("val-core/") and "/acc/mean" in key:
                circles = style | {"label": f"{run.name}, validation", "linestyle": ""}
                axes.plot(*run.series(key), "o", markersize=6, markerfacecolor="none", **circles)
    return ("training step", curve.unit) if having else None
