"""`sam report RUN [BASELINE [PEER ...]]`: a run beside its baseline, on one HTML page and as JSON.

The first run speculates; without a second one nothing is compared. Behind them, such pairs of other seeds give a band
to what differs, and any other run its curves. A run is a run directory.
"""

import json
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from recipe.sam_dapo.record import differences
from recipe.sam_dapo.report.runs import (
    MEASURE,
    ROLLOUT_SECONDS,
    TAIL_SECONDS,
    Run,
    common_steps,
    compare_responses,
    drafted_texts,
    load_runs,
    load_stock,
    method_of,
    of_seeds,
    rows_of,
)
from sam.bench.result import table_of, times
from sam.command import Parser, run_command
from sam.page import Picture, Section, page, picture
from sam.record.engine_steps import EngineSteps

TITLE = "Does speculation pay?"
NOT_RECORDED = "not recorded"
STEP, ROLLOUT, TAIL = "training step", "its rollout", "the rollout's tail"
LEAST_SECONDS = 0.01  # of a phase that is shown


class Curve(NamedTuple):
    """A metric over the training steps."""

    name: str
    key: str
    unit: str
    caption: str


REWARD = Curve("reward", "rollout/reward_all/mean", "mean reward", "Of all responses, those of dropped groups too.")
LENGTH = Curve("response length", "response_length/mean", "tokens", "Mean of the responses trained on.")
ACCURACY = Curve("accuracy", "rollout/acc_all/mean", "share of right answers", "Circles: the held-out set.")
ENTROPY = Curve("entropy", "actor/entropy", "nats per token", "Of the policy on the responses trained on.")
GRADIENT = Curve("gradient norm", "actor/grad_norm", "gradient norm", "Before clipping.")
ACCEPTED = Curve("acceptance", "rollout/spec_accept_length", "mean acceptance length", "1 is no gain.")
COMPARED = (REWARD, LENGTH, ACCURACY, ENTROPY, GRADIENT)
PHASE_HEADER = ("seconds a step", "steps with it", "first", "second", "times as fast", "time saved")

LOOK = {
    "font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.labelsize": 9, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
}  # fmt: skip
COLORS = ("#009E73", "#999999", "#D55E00", "#E69F00", "#0072B2", "#CC79A7")  # of the runs, in turn; Okabe and Ito's
DASHES = ("-", "--", "-.", ":")
SIZE, WIDE = (4.8, 3.0), (5.6, 3.0)  # inches; the first picture is as wide as two
POINTS = 120  # of a curve over time
RUNNING = "Running requests, and the drafts verified and accepted"
RUNNING_CAPTION = "In a rollout of median length. Drafts are the first run's: those that its switch let through."
DRAFTED = (
    "Green: accepted drafts. Black: the model's own tokens. Grey: what tools answered. A run counts accepted drafts, "
    "not which they were: here sam drafts the recorded text again, in every step, from the prompt's samples alone."
)
Labels = tuple[str, str] | None  # of the axes; None: there is nothing to see


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="sam report", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path, help="run directories: speculating, baseline, peers")
    parser.add_argument("--output", type=Path, help="where to write; by default the first run directory's parent")
    options = parser.parse_args(arguments)
    return run_command(lambda: report(options.runs, options.output))


def report(directories: list[Path], output: Path | None) -> str:
    """Write report.html and summary.json into `output`; returns what is printed."""
    runs = load_runs(directories)
    output = output or runs[0].directory.parent
    against, note = load_stock(output, runs[0])
    summary = summarize(runs) | {"stock": against and rows_of(against), "stock_note": note}
    texts = drafted_texts(runs[0])
    output.mkdir(parents=True, exist_ok=True)
    (output / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    (output / "report.html").write_text(as_html(runs, summary, against, texts))
    values = [f"{name:<24}{value}" for name, value in facts(summary)]
    notes = (f"note: {line}" for line in remarks(runs, summary))
    return "\n".join([*answer(runs, summary, against), *values, *notes, f"report: {output / 'report.html'}"])


def as_html(runs: list[Run], summary: dict, against: dict | None, texts: list) -> str:
    """The page: the answer, the pictures, responses, then the tables that have rows."""
    differing = differences(runs[0].config, runs[1].config).items() if runs[1:] else ()
    tables = {
        "Figures": (("figure", "value"), facts(summary)),
        "What to know of these figures": (("note",), [(line,) for line in remarks(runs, summary)]),
        "Engines alone, on the recorded text": table_of(against) if against else ((), ()),
        "Seconds of each phase": (PHASE_HEADER if runs[1:] else PHASE_HEADER[:3], phases(runs)),
        "What differs between the two configs": (("key", "first", "second"), [(k, *v) for k, v in differing]),
        "To repeat the first run": (("what", "value"), list(runs[0].versions.items())),
    }
    drafts = Section("Drafts in a few responses", caption=DRAFTED, texts=texts)
    sections = [Section("", draw_all(runs)), *[drafts] * bool(texts)]
    sections += [Section(title, table=table) for title, table in tables.items() if table[1]]
    return page(TITLE, answer(runs, summary, against), sections)


def summarize(runs: list[Run]) -> dict:
    """The figures of summary.json; the first run speculates, the second is the baseline. None is: not recorded."""
    first, *beside = runs[:2]
    identical = compare_responses(first, *beside) if beside else {}
    accept_length, accept_rate = first.acceptance()
    return {
        "seconds_a_step": {name: means for name, (_, means) in _phases(runs).items()},
        "accept_length": accept_length,
        "accept_rate": accept_rate,
        "accept_length_by_turn": EngineSteps.turn_lengths(first.recorded.values()),
        "identical_responses": sum(same for same, _ in identical.values()) if identical else None,
        "total_responses": sum(total for _, total in identical.values()),
        "identical_by_step": {str(step): list(counts) for step, counts in identical.items()},
        "steps": len(common_steps(runs[:2])),
        "rollout_seconds": {run.name: run.seconds(run.steps) for run in runs},
        "versions": first.versions,
        "runs": [str(run.directory) for run in runs],
        "curves": compare_curves(runs),
    }


def answer(runs: list[Run], summary: dict, against: dict | None) -> list[str]:
    """What the report says, in a few lines; the first is the headline. `against`: what stock.json holds, or None."""
    names, timed = [run.name for run in runs[:2]], {row[0]: row for row in phases(runs)}
    lines = [_line(name, timed.get(name)) for name in (STEP, ROLLOUT, TAIL)]
    lines.append(f"Mean of {summary['steps']} steps, speculation={' to '.join(reversed(names))}.")
    if runs[1:]:
        same = _figure(summary, "{} of {}, token for token", "identical_responses", "total_responses")
        curves = ", ".join(f"{name} {said}" for name, said in summary["curves"].items()) or NOT_RECORDED
        more = " A band needs other seeds too: sam report SAM OFF SAM2 OFF2." * ("(one seed)" in curves)
        lines += [f"Identical responses: {same}.", f"Curves, first less second: {curves}.{more}"]
    if against:
        method, rows = method_of(against), rows_of(against)
        row = rows[method]
        lines.append(
            f"Engines alone, on this run's responses: {method} {times(row)} as fast as stock vLLM: {row['answer']} "
            f"({row['rounds']} rounds of {row['requests']} requests); without drafts (off) {times(rows['off'])}."
        )
    if not runs[1:]:
        return [*lines, "Next: the same command with speculation=off and another run_dir, then sam report RUN OFF."]
    on, off = summary["seconds_a_step"].get(STEP, (0.0, 0.0))
    if on < off:
        return [*lines, f"Next: sam tune {runs[0].directory} looks for faster settings."]
    return [*lines, f"Next: {MEASURE} {runs[0].directory} says what drafts bring without the trainer."]


def _line(name: str, row: tuple | None) -> str:
    """A row of PHASE_HEADER in words."""
    if row is None:
        return f"{name.capitalize()}: {NOT_RECORDED}"
    _, _, on, *beside = row
    if not beside:
        return f"{name.capitalize()} {on} s"
    off, times_as_fast, saved = beside
    change = f"{saved[1:]} longer" if saved.startswith("-") else f"{saved} of time saved"
    return f"{name.capitalize()} {off} s to {on} s: {times_as_fast} as fast, {change}"


def facts(summary: dict) -> list[tuple[str, str]]:
    """Name and value of what a reader looks for next."""
    seconds = ", ".join(f"{name} {its:.0f}" for name, its in summary["rollout_seconds"].items())
    by_turn = ", ".join(f"{length:.2f}" for length in summary["accept_length_by_turn"].values())
    return [
        ("mean acceptance length", _figure(summary, "{:.2f}", "accept_length")),
        *([("by turn (first replica)", by_turn)] if by_turn else []),
        ("acceptance rate", _figure(summary, "{:.2f}", "accept_rate")),
        ("rollout seconds", seconds),
    ]


def _figure(summary: dict, form: str, *keys: str) -> str:
    values = [summary[key] for key in keys]
    return form.format(*values) if all(value is not None and np.isfinite(value) for value in values) else NOT_RECORDED


def remarks(runs: list[Run], summary: dict) -> list[str]:
    """A line for each part that is left out or read in another way than usual, and why."""
    sources = ", ".join(str(run.directory) for run in runs if not run.recorded)  # reading them may add a remark
    lines = [remark for run in runs for remark in run.remarks] + [summary["stock_note"]] * bool(summary["stock_note"])
    if sources:
        lines.append(f"no engine steps in {sources}: running requests over time left out")
    if sources := ", ".join(str(run.directory) for run in runs[:2] if runs[1:] and not run.has_responses):
        lines.append(f"no responses in {sources}: identical responses left out")
    if TAIL not in summary["seconds_a_step"]:
        lines.append(f"the tail is left out: not {TAIL_SECONDS} of one batch_size_threshold in both runs, or no tail")
    if runs[0].name == "off" and runs[1:]:
        lines.append("the first run has speculation off: name the run that speculates first, the baseline second")
    return lines


def _values(runs: list[Run], key: str) -> np.ndarray:
    """float [steps, runs]: a figure in the training steps of which all runs have it."""
    rows = [[run.metrics[step].get(key) for run in runs] for step in common_steps(runs)]
    return np.array([row for row in rows if None not in row])


def compare_curves(runs: list[Run]) -> dict[str, str]:
    """By curve, the first run's mean less the second's with its band over the seeds."""
    found = {}
    for curve in COMPARED if runs[1:] else ():
        seeds = [values for pair in of_seeds(runs) if len(values := _values(pair, curve.key))]
        apart = [float(np.mean(values[:, 0] - values[:, 1])) for values in seeds]
        if apart and np.isfinite(apart).all():
            band = f"{min(apart):+.2g} to {max(apart):+.2g}, {len(apart)} seeds" if len(apart) > 1 else "one seed"
            differs = any(np.ptp(values, axis=1).any() for values in seeds)
            found[curve.name] = f"{np.mean(apart):+.2g} ({band})" if differs else "identical"
    return found


def _phases(runs: list[Run]) -> dict[str, tuple[int, list[float]]]:
    """Steps and mean seconds, of the first two runs, of each timed phase in the steps that have it in both."""
    runs = runs[:2]
    names = {"timing_s/step": STEP, ROLLOUT_SECONDS: ROLLOUT}
    thresholds = {run.threshold() for run in runs}
    if len(thresholds) == 1 and None not in thresholds:  # else tails are not the same
        names[TAIL_SECONDS] = TAIL
    for key in {key for run in runs for row in run.metrics.values() for key in row}:
        phase, _, name = key.rpartition("/")
        if phase == "timing_s":
            names.setdefault(key, name)
    values = {name: _values(runs, key) for key, name in names.items()}
    means = {name: (len(those), those.mean(0).tolist()) for name, those in values.items() if len(those)}
    return {name: row for name, row in means.items() if all(LEAST_SECONDS <= mean < np.inf for mean in row[1])}


def phases(runs: list[Run]) -> list[tuple]:
    """One row for each timed phase, longest first, as PHASE_HEADER."""
    rows = []
    for name, (steps, means) in sorted(_phases(runs).items(), key=lambda item: -item[1][1][-1]):
        on, off = means[0], means[-1]
        compared = (f"{off / on:.2f}x", f"{100 * (off - on) / off:.1f} %") if len(means) > 1 else ()
        rows.append((name, steps, *(f"{mean:.2f}" for mean in means), *compared))
    return rows


def draw_all(runs: list[Run]) -> list[Picture]:
    """What the runs have recorded."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    found: list[Picture] = []
    styled = [
        (run, {"label": run.name, "color": COLORS[n % len(COLORS)], "linestyle": DASHES[n % len(DASHES)]})
        for n, run in enumerate(runs)
    ]
    drawn = [(RUNNING, RUNNING_CAPTION, _drafts)]
    drawn += [(one.name.capitalize(), one.caption, partial(_curve, one)) for one in (*COMPARED, ACCEPTED)]
    with rc_context(LOOK):
        for title, caption, draw in drawn:
            figure = Figure(figsize=SIZE if found else WIDE, layout="constrained")
            axes = figure.subplots()
            if (labels := draw(axes, styled)) is not None:
                axes.set(xlabel=labels[0], ylabel=labels[1], title=title)
                axes.xaxis.get_major_locator().set_params(integer=True)
                axes.legend()
                found.append(picture(figure, title, caption))
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
