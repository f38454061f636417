"""What the report says in words: whether speculation is worth it, what it costs, and whether the runs are the same."""

from pathlib import Path
from typing import Any

import numpy as np

from recipe.sam_dapo.report.phases import (
    ROLLOUT,
    STEP,
    TAIL,
    Gain,
    gain_of,
    outside_of_steps,
    phases_of,
    times_as_fast,
    values,
)
from recipe.sam_dapo.report.runs import (
    MEASURE,
    ROLLOUT_SECONDS,
    TAIL_SECONDS,
    Run,
    common_steps,
    compare_responses,
    method_of,
    pairs_by_seed,
    rows_of,
)
from sam.record.engine_steps import EngineSteps
from sam.tools.bench.result import times

NOT_RECORDED = "not recorded"
COMPARED = {  # name to key: what training does
    "reward": "rollout/reward_all/mean",
    "response length": "response_length/mean",
    "accuracy": "rollout/acc_all/mean",
    "entropy": "actor/entropy",
    "gradient norm": "actor/grad_norm",
}


def summarize(runs: list[Run]) -> dict[str, Any]:
    """The figures of summary.json; the first run speculates, the second is the baseline. None is: not recorded."""
    first, *beside = runs[:2]
    identical = compare_responses(first, *beside) if beside else {}
    accept_length, accept_rate = first.acceptance()
    return {
        "seconds_a_step": {phase.name: phase.means.tolist() for phase in phases_of(runs[:2])},
        "drafting_seconds_a_step": drafting_seconds(first),
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


def drafting_seconds(run: Run) -> float | None:
    """Of a training step: its rollout's seconds times drafting's share of the engine steps; None: not recorded."""
    shares = [f"rollout/{name}_ms_per_step" for name in ("draft", "step")]
    rows = [run.metrics[step] for step in run.steps]
    if not all(key in row for row in rows for key in shares):
        return None
    draft, step = shares
    return float(np.mean([row[ROLLOUT_SECONDS] * row[draft] / max(row[step], 1e-9) for row in rows]))


def answer(runs: list[Run], summary: dict[str, Any], against: dict[str, Any] | None) -> list[str]:
    """What the report says, in a few lines; the first is the headline. `against`: what stock.json holds, or None."""
    phases = {phase.name: phase for phase in phases_of(runs[:2])}
    step = phases.get(STEP)
    if not runs[1:]:
        seconds = ", ".join(f"{name} {phases[name].means[0]:.2f} s" for name in (STEP, ROLLOUT, TAIL) if name in phases)
        return [
            f"{seconds[:1].upper()}{seconds[1:]}: mean of {summary['steps']} steps, speculation={runs[0].name}",
            set_up(runs[0]),
            beside_stock(against) if against else "",
            "Next: the same command with speculation=off and another run_dir, then sam report RUN OFF.",
        ]
    gains = {name: gain_of(phases[name], step) for name in (STEP, ROLLOUT, TAIL) if name in phases}
    lines = [headline(runs, gains.get(STEP), summary)]
    ratios = ", ".join(f"{name} {times_as_fast(gain)}" for name, gain in gains.items())
    lines.append(f"Times as fast, mean (range over {summary['steps']} steps): {ratios}.")
    lines += device_hours(runs[0], summary)
    lines.append(set_up(runs[0]))
    same = figure(summary, "{} of {}, token for token", "identical_responses", "total_responses")
    lines.append(f"Identical responses: {same}.")
    lines.append(describe_curves(runs, summary["curves"]))
    if against:
        lines.append(beside_stock(against))
    if STEP in gains and gains[STEP].saved > 0:
        return [*lines, f"Next: sam tune {runs[0].directory} looks for faster settings."]
    return [*lines, f"Next: {MEASURE} {runs[0].directory} says what drafts bring without the trainer."]


def describe_curves(runs: list[Run], curves: dict[str, str]) -> str:
    """Whether training went alike."""
    if curves and set(curves.values()) == {"identical"}:
        return f"Training curves identical: {', '.join(curves)}."
    apart = ", ".join(f"{name} {figure}" for name, figure in curves.items()) or NOT_RECORDED
    more = " Another seed of both gives a band: sam report SAM OFF SAM2 OFF2." if "(one seed)" in apart else ""
    return f"Training curves, {runs[0].name} less {runs[1].name}: {apart}.{more}"


def headline(runs: list[Run], gain: Gain | None, summary: dict[str, Any]) -> str:
    """Whether it is worth it, and what it costs."""
    if gain is None:
        return f"Is it worth it? The seconds of a {STEP} are {NOT_RECORDED}"
    on, off = summary["seconds_a_step"][STEP]
    seconds = f"a {STEP} takes {on:.2f} s with {runs[0].name}, {off:.2f} s with {runs[1].name}"
    drafting = summary["drafting_seconds_a_step"]
    cost = f"; drafting costs {drafting:.2f} s of it" if drafting is not None else ""
    percent = f"{100 * abs(gain.share):.1f} %"
    if gain.is_noise:
        return f"No difference beyond noise: {seconds}{cost}"
    if gain.saved > 0:
        return f"Worth it: {seconds}, {percent} saved{cost}"
    return f"Not worth it: {seconds}, {percent} longer{cost}"


def device_hours(run: Run, summary: dict[str, Any]) -> list[str]:
    """Of 1,000 such steps, in a line; none where the run's config does not say on what it ran."""
    trainer = run.config.get("trainer") or {}
    counts = [trainer.get(name) for name in ("nnodes", "n_gpus_per_node")]
    if STEP not in summary["seconds_a_step"] or not all(type(count) is int for count in counts):
        return []
    devices = counts[0] * counts[1]
    on, off = (seconds * devices / 3.6 for seconds in summary["seconds_a_step"][STEP])
    return [f"1,000 such steps: {on:.1f} instead of {off:.1f} device hours."]


def set_up(run: Run) -> str:
    """The model, the device and the engine, in a line."""
    trainer = run.config.get("trainer") or {}
    parts = []
    if path := ((run.config.get("actor_rollout_ref") or {}).get("model") or {}).get("path"):
        parts.append(f"model {'/'.join(Path(str(path)).parts[-2:])}")
    if device := trainer.get("device"):
        parts.append(f"{trainer.get('nnodes', 1)} x {trainer.get('n_gpus_per_node', 1)} {device}")
    parts += [f"{name} {run.versions[name]}" for name in ("verl", "vllm") if run.versions.get(name)]
    return f"Set-up: {', '.join(parts)}." if parts else ""


def beside_stock(against: dict[str, Any]) -> str:
    """What stock.json says, in a line."""
    method = method_of(against)
    rows = rows_of(against)
    row = rows[method]
    return (
        f"Engines alone, on this run's responses: {method} {times(row)} as fast as stock vLLM: {row['answer']} "
        f"({row['rounds']} rounds of {row['requests']} requests); without drafts (off) {times(rows['off'])}."
    )


def facts(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and value of what a reader looks for next."""
    seconds = ", ".join(f"{name} {total:.0f}" for name, total in summary["rollout_seconds"].items())
    by_turn = ", ".join(f"{length:.2f}" for length in summary["accept_length_by_turn"].values())
    rows = [("mean acceptance length", figure(summary, "{:.2f}", "accept_length"))]
    if by_turn:
        rows.append(("by turn (first replica)", by_turn))
    rows.append(("acceptance rate", figure(summary, "{:.2f}", "accept_rate")))
    rows.append(("rollout seconds, all steps", seconds))
    return rows


def figure(summary: dict[str, Any], form: str, *keys: str) -> str:
    """Figures of the summary in words; NOT_RECORDED where one is missing."""
    figures = [summary[key] for key in keys]
    if any(value is None or not np.isfinite(value) for value in figures):
        return NOT_RECORDED
    return form.format(*figures)


def remarks(runs: list[Run], summary: dict[str, Any]) -> list[str]:
    """A line for each part that is left out or read in another way than usual, and why."""
    without_steps = [run for run in runs if not run.recorded]  # reading them may add a remark
    without_times = [run for run in runs[:2] if run.has_responses and not run.spans(runs[0].median_step())]
    without_responses = [run for run in runs[:2] if runs[1:] and not run.has_responses]
    lines = [remark for run in runs for remark in run.remarks]
    if summary["stock_note"]:
        lines.append(summary["stock_note"])
    for missing, remark in (
        (without_steps, "no engine steps in {}: running requests over time left out"),
        (without_responses, "no responses in {}: identical responses left out"),
        (without_times, "no times of responses in {}, of an older version: left out"),
    ):
        if missing:
            lines.append(remark.format(", ".join(str(run.directory) for run in missing)))
    if TAIL not in summary["seconds_a_step"]:
        lines.append(f"the tail is left out: not {TAIL_SECONDS} of one batch_size_threshold in both runs, or no tail")
    if runs[0].name == "off" and runs[1:]:
        lines.append("the first run has speculation off: name the run that speculates first, the baseline second")
    return [*lines, *outside_of_steps(runs)]


def compare_curves(runs: list[Run]) -> dict[str, str]:
    """By curve, the first run's mean less the second's with its band over the seeds."""
    if not runs[1:]:
        return {}
    curves = {}
    for name, key in COMPARED.items():
        pairs = [values(pair, key) for pair in pairs_by_seed(runs)]  # each float [steps, 2]
        pairs = [pair for pair in pairs if len(pair)]
        apart = [float(np.mean(pair[:, 0] - pair[:, 1])) for pair in pairs]
        if apart and np.isfinite(apart).all():
            band = f"{min(apart):+.2g} to {max(apart):+.2g}, {len(apart)} seeds" if len(apart) > 1 else "one seed"
            differs = any(np.ptp(pair, axis=1).any() for pair in pairs)
            curves[name] = f"{np.mean(apart):+.2g} ({band})" if differs else "identical"
    return curves
