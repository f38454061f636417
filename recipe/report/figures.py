"""The report's figures: summary.json, the answer in words, and the tables."""

from typing import NamedTuple

import numpy as np

from recipe.report import stock
from recipe.report.runs import ROLLOUT_SECONDS, TAIL_SECONDS, Run, common_steps, compare_responses, left_out
from sam.bench.result import GO, times
from sam.reading import expect, json_object

NOT_RECORDED = "not recorded"
STEPS_AT_AN_END = 3  # the reward's gain is that of the last steps' mean over the first steps'
SIGNIFICANT = 0.05
RESAMPLES = 10_000


class Curve(NamedTuple):
    """A metric over the training steps."""

    name: str
    key: str
    unit: str
    caption: str


REWARD = Curve("reward", "rollout/reward_all/mean", "mean reward", "Of all responses, those of dropped groups too.")
ACCURACY = Curve("accuracy", "rollout/acc_all/mean", "share of right answers", "Circles: the held-out set.")
LENGTH = Curve("response length", "response_length/mean", "tokens", "Mean of the responses trained on.")
LEARNT = (
    Curve("reward, groups trained on", "critic/score/mean", "mean reward", "Of the responses trained on."),
    Curve("entropy", "actor/entropy", "nats per token", "Of the policy on the responses trained on."),
    Curve("gradient norm", "actor/grad_norm", "gradient norm", "Before clipping."),
)
COMPARED = (REWARD, ACCURACY, LENGTH, *LEARNT)

AGREEMENT_HEADER = (
    "curve", "steps", "first, mean", "second, mean", "difference, mean ± standard error", "largest in a step", "p",
    "verdict",
)  # fmt: skip
PHASE_HEADER = (
    "seconds a step", "steps with it", "first", "second", "saved, of the second", "saved, of the first (as published)",
)  # fmt: skip


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
        "asynchronous_scheduling": {run.name: run.is_asynchronous() for run in runs},
        "peak_memory_gib": _peak_memory(runs),
        "versions": first.versions,
        "runs": [run.source for run in runs],
        "agreement": {
            row[0]: dict(zip(AGREEMENT_HEADER[1:], row[1:], strict=True)) for row in agreement(first, second)
        },
    }


def _over(theirs: float | None, its: float | None) -> float | None:
    return theirs / its if its and theirs is not None else None


def _gain(run: Run) -> float | None:
    rewards = run.series(REWARD.key)[1]
    return float(np.mean(rewards[-STEPS_AT_AN_END:]) - np.mean(rewards[:STEPS_AT_AN_END])) if rewards else None


def _peak_memory(runs: list[Run]) -> float | None:
    peaks = []
    for run in runs:
        if run.directory and (path := run.directory / "peak_memory.json").is_file():
            with left_out(run.remarks):
                peak = json_object(path).get("peak_memory_gib")
                expect(type(peak) in (int, float), f"{path}, peak_memory_gib", "a number", peak)
                peaks.append(peak)
    return max(peaks, default=None)


def answer(summary: dict, against: dict | None) -> list[str]:
    """What the report says, in a few lines; the first is the headline. `against`: what stock.json holds, or None."""
    first, second = list(summary["seconds"])[:2]
    seconds = [summary["seconds"][name]["rollout"] for name in (second, first)]
    in_verl = f"{_figure(summary, '{:.2f}x', 'rollout_speedup_total')} speculation={second}"
    in_verl += f" ({seconds[0]:.1f} s to {seconds[1]:.1f} s in {summary['steps']} steps)"
    if against:
        method, rows = stock.method_of(against), stock.rows_of(against)
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
        lines = [f"Rollout {in_verl}", f"Stock vLLM was not measured ({stock.MEASURE})."]
    same = _figure(summary, "{} of {}", "identical_responses", "total_responses")
    with_both = f" responses identical, token for token, with speculation={first} and {second}."
    lines.append("Identical responses: not recorded." if same == NOT_RECORDED else same + with_both)
    rows = {curve.name: summary["agreement"].get(curve.name) for curve in (REWARD, LENGTH)}
    curves = ", ".join(f"{name}: {row['verdict']}, p {row['p']}" for name, row in rows.items() if row)
    return [*lines, f"Curves (paired test): {curves or NOT_RECORDED}."]


def facts(summary: dict) -> list[tuple[str, str]]:
    """Name and value of what a reader looks for next."""
    seconds = ", ".join(f"{name} {its['rollout']:.0f}" for name, its in summary["seconds"].items())
    words = {True: "asynchronously", False: "synchronously", None: NOT_RECORDED}
    scheduled = ", ".join(f"{name} {words[one]}" for name, one in summary["asynchronous_scheduling"].items())
    gains = "{:+.3f} against {:+.3f} (last three steps over first three)"
    return [
        ("rollout speed-up, tail", _figure(summary, "{:.2f}x (at most {} running)", "rollout_speedup_tail",
                                           "tail_threshold")),
        ("mean acceptance length", _figure(summary, "{:.2f}", "accept_length")),
        ("acceptance rate", _figure(summary, "{:.2f}", "accept_rate")),
        ("reward gain", _figure(summary, gains, "reward_gain_sam", "reward_gain_off")),
        ("rollout seconds", seconds),
        ("engines scheduled", scheduled),
        ("peak memory", _figure(summary, "{} GiB", "peak_memory_gib")),
    ]  # fmt: skip


def _figure(summary: dict, form: str, *keys: str) -> str:
    values = [summary[key] for key in keys]
    return form.format(*values) if all(value is not None and np.isfinite(value) for value in values) else NOT_RECORDED


def remarks(runs: list[Run], summary: dict) -> list[str]:
    """A line for each part that is left out or read in another way than usual, and why."""
    sources = ", ".join(run.source for run in runs if not run.recorded)  # reading them may add a remark
    lines = [remark for run in runs for remark in run.remarks]
    lines += [summary["stock_note"]] if summary["stock_note"] else []
    if sources:
        lines.append(f"no engine steps in {sources}: running requests over time and acceptance by position left out")
    if sources := ", ".join(run.source for run in runs[:2] if not run.has_responses):
        lines.append(f"no responses in {sources}: identical responses left out")
    if summary["rollout_speedup_tail"] is None:
        lines.append(f"the tail is left out: not {TAIL_SECONDS} of one batch_size_threshold in both runs, or no tail")
    if runs[0].rollout_key != ROLLOUT_SECONDS[0]:
        lines.append(f"rollout time is verl's {runs[0].rollout_key}: {ROLLOUT_SECONDS[0]} is not in all runs")
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
    steps = [step for step in common_steps(first, second) if all(run.has([key], [step]) for run in (first, second))]
    return np.stack([first.column(key, steps), second.column(key, steps)], axis=1).reshape(-1, 2)


def agreement(first: Run, second: Run) -> list[tuple]:
    """One row for each curve that both runs have, as AGREEMENT_HEADER; p of a paired test of the steps' differences."""
    rows = []
    for name, key, *_ in COMPARED:
        if len(pairs := _pairs(first, second, key)):
            difference = pairs[:, 0] - pairs[:, 1]
            p = sign_flip_p_value(difference)
            verdict = "equal" if not difference.any() else "no difference found" if p >= SIGNIFICANT else "different"
            spread = f"{difference.mean():+.2g}"
            if len(pairs) > 1:
                spread += f" ± {difference.std(ddof=1) / np.sqrt(len(pairs)):.2g}"
            means = [f"{value:.4g}" for value in pairs.mean(0)]
            rows.append((name, len(pairs), *means, spread, f"{np.abs(difference).max():.2g}", f"{p:.3f}", verdict))
    return rows


def phases(first: Run, second: Run) -> list[tuple]:
    """One row for each timed phase of both runs, longest first, as PHASE_HEADER.

    The tail and the generation rounds of dynamic sampling, of the steps that had them in both runs, are phases of their
    own. The published tables give (second - first) / first: 4159 s to 3793 s are their -9.6 %, of the second 8.8 %.
    """
    names = {first.rollout_key: "rollout"}
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
