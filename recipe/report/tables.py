"""Whether two runs' curves agree, in numbers, and where their time went, in the form of the published tables."""

import numpy as np

from recipe.report.paired_test import sign_flip_p_value
from recipe.report.runs import Run, common_steps, compare_responses

CURVES = {
    "reward": "rollout/reward_all/mean",
    "reward, groups trained on": "critic/score/mean",
    "accuracy": "rollout/acc_all/mean",
    "response length": "response_length/mean",
    "entropy": "actor/entropy",
    "gradient norm": "actor/grad_norm",
}
SIGNIFICANT = 0.05
AGREEMENT_HEADER = (
    "curve",
    "steps",
    "first, mean",
    "second, mean",
    "difference, mean ± standard error",
    "largest in a step",
    "p",
    "verdict",
)
STEP_HEADER = (
    "step",
    "reward, first",
    "second",
    "difference",
    "response length, first",
    "second",
    "difference",
    "identical responses",
)
PHASE_HEADER = (
    "seconds a step",
    "steps with it",
    "first",
    "second",
    "saved, of the second",
    "saved, of the first (as published)",
)
TAIL_HEADER = ("run", "running requests at most", "tail, seconds a step", "share of the rollout", "tail speed-up")
ENGINES_HEADER = ("run", "scheduled", "steps with drafts", "replayed a graph", "steps without", "replayed a graph")
ACCEPTANCE_HEADER = ("run", "steps", "acceptance length", "acceptance rate")
PUBLISHED_HEADER = ("", "one generation round, mean of the replicas, s", "rollout of a step, s", "whole step, s")

# docs/llm_rl/sam_decoding.md of cann-recipes-train, section 3.2: seconds without SAM and with, columns as
# PUBLISHED_HEADER. A domain of data parallelism there is a replica here.
PUBLISHED_BY = "published by cann-recipes-train, not ours"
PUBLISHED = {
    "Qwen3-32B, 32 dies, threshold 8, k 3": ((3904.22, 4159.06, 4730.86), (3548.62, 3793.29, 4374.99)),
    "Qwen3-235B-A22B, 128 dies, threshold 8, k 3": ((7102.92, 14287.54, 15441.45), (6467.52, 12811.98, 13960.98)),
    "Qwen3-32B, 128 dies, threshold 4, k 4": ((None, 9094.0, 11870.0), (None, 8223.0, 11000.0)),
}
PUBLISHED_TAIL = (PUBLISHED_BY, "8", "not given", "not given", "1.35x")


def _pairs(first: Run, second: Run, key: str) -> np.ndarray:
    """float [steps, 2]: the values of the training steps that both runs have, and that are numbers in both."""
    steps = [step for step in common_steps(first, second) if first.has(key, [step]) and second.has(key, [step])]
    pairs = np.array([(first.metrics[step][key], second.metrics[step][key]) for step in steps]).reshape(-1, 2)
    return pairs[np.isfinite(pairs).all(1)]


def agreement(first: Run, second: Run) -> list[tuple]:
    """One row for each curve that both runs have, as AGREEMENT_HEADER; p of a paired test of the steps' differences."""
    rows = []
    for name, key in CURVES.items():
        pairs = _pairs(first, second, key)
        if len(pairs):
            difference = pairs[:, 0] - pairs[:, 1]
            means = [f"{value:.4g}" for value in pairs.mean(0)]
            p = sign_flip_p_value(difference)
            verdict = "equal" if not difference.any() else "no difference found" if p >= SIGNIFICANT else "different"
            spread = f"{difference.mean():+.2g}"
            if len(pairs) > 1:
                spread += f" ± {difference.std(ddof=1) / np.sqrt(len(pairs)):.2g}"
            rows.append((name, len(pairs), *means, spread, f"{np.abs(difference).max():.2g}", f"{p:.3f}", verdict))
    return rows


def step_by_step(first: Run, second: Run) -> list[tuple]:
    """One row for each training step that both runs have, as STEP_HEADER; empty cells where it is not recorded."""
    identical = compare_responses(first, second)
    rows = []
    for step in common_steps(first, second):
        cells: list = [step]
        for key in (CURVES["reward"], CURVES["response length"]):
            if first.has(key, [step]) and second.has(key, [step]):
                one, other = first.metrics[step][key], second.metrics[step][key]
                cells += [f"{one:.4g}", f"{other:.4g}", f"{one - other:+.2g}"]
            else:
                cells += ["", "", ""]
        rows.append((*cells, "{} of {}".format(*identical[step]) if step in identical else ""))
    return rows


def phases(first: Run, second: Run) -> list[tuple]:
    """One row for each timed phase of both runs, longest first, as PHASE_HEADER.

    A generation round of dynamic sampling is a phase of its own, of the steps that had it in both runs. The published
    tables give (second - first) / first: 4159 s to 3793 s are their -9.6 %, of the second 8.8 %.
    """
    names = {first.rollout_key: first.rollout_key}
    for key in {key for run in (first, second) for row in run.metrics.values() for key in row}:
        phase, _, name = key.rpartition("/")
        if key.startswith("timing_s/") and key not in names:
            names[key] = key.removeprefix("timing_s/")
        elif phase == "rollout/round_seconds" and name.isdigit():
            names[key] = f"generation round {name}"
    rows = []
    for key, name in names.items():
        pairs = _pairs(first, second, key)
        if len(pairs) and pairs.mean() >= 0.01:
            on, off = pairs.mean(0).tolist()
            saved = (_percent(off - on, whole) for whole in (off, on))
            rows.append((off, (name, len(pairs), f"{on:.2f}", f"{off:.2f}", *saved)))
    return [row for _, row in sorted(rows, key=lambda pair: -pair[0])]


def tails(runs: list[Run]) -> list[tuple]:
    """One row for each run whose tail is known, and the published figure, as TAIL_HEADER; runs[1] is the baseline."""
    threshold = runs[0].speculation("batch_size_threshold")
    rows = []
    for run in runs:
        steps = sorted(set(run.steps) & set(runs[1].steps))
        tail, baseline = run.tail(steps, threshold), runs[1].tail(steps, threshold)
        if tail and steps:
            speedup = f"{baseline[0] / tail[0]:.2f}x" if baseline and tail[0] else "not known"
            rows.append((run.name, threshold, f"{tail[0] / len(steps):.2f}", f"{100 * tail[1]:.1f} %", speedup))
    return [*rows, PUBLISHED_TAIL] if rows else []


def engines(runs: list[Run]) -> list[tuple]:
    """How each run's engines schedule, and the steps of a phase that replayed a graph, as ENGINES_HEADER; empty cells
    where it is not recorded."""
    rows = []
    for run in runs:
        is_asynchronous, replay = run.is_asynchronous(), run.graph_replay()
        if is_asynchronous is not None:
            cells = ["asynchronously" if is_asynchronous else "synchronously"]
            for steps, share in (replay or {}).values():
                without = "no graphs" if steps else ""
                cells += [steps, without if share is None else _percent(share, 1)]
            rows.append((run.name, *cells, *[""] * (len(ENGINES_HEADER) - 1 - len(cells))))
    return rows


def acceptance_over_training(runs: list[Run]) -> list[tuple]:
    """Means over the first, middle and last third of the steps of each run that drafts, as ACCEPTANCE_HEADER."""
    keys = ("rollout/spec_accept_length", "rollout/spec_accept_rate")
    rows = []
    for run in runs:
        steps = [step for step in run.steps if all(run.has(key, [step]) for key in keys)]
        if not any(run.metrics[step].get("rollout/spec_drafted_tokens", 1) for step in steps):
            continue
        for third in np.array_split(steps, 3):
            if len(third):
                means = (f"{run.column(key, third).mean():.2f}" for key in keys)
                rows.append((run.name, f"{third[0]} to {third[-1]}", *means))
    return rows


def published(first: Run, second: Run) -> list[tuple]:
    """Seconds a step of both runs in the columns of the published tables, as PUBLISHED_HEADER, and those below."""
    steps = common_steps(first, second)
    off, on = _published_columns(second, steps), _published_columns(first, steps)
    rows = [(f"{second.name}, baseline", *map(_seconds, off)), (first.name, *map(_seconds, on)), *_savings(off, on)]
    for setting, (off, on) in PUBLISHED.items():
        theirs = [("without SAM", *map(_seconds, off)), ("with SAM", *map(_seconds, on)), *_savings(off, on)]
        rows += [(f"{PUBLISHED_BY}: {setting}: {label}", *cells) for label, *cells in theirs]
    return rows


def _published_columns(run: Run, steps: list[int]) -> tuple[float | None, ...]:
    """Seconds, as PUBLISHED_HEADER. Without its own metric a round's are the slowest replica's, not the mean."""
    a_round = a_step = None
    if run.has("rollout/rounds", steps):
        rounds, mean = run.column("rollout/rounds", steps), "rollout/round_seconds/replica_mean"
        known = run.has(mean, steps)
        each = run.column(mean, steps) if known else run.column(run.rollout_key, steps) / rounds
        a_round = float(np.average(each, weights=rounds))
    if run.has("timing_s/step", steps):
        a_step = float(run.column("timing_s/step", steps).mean())
    return a_round, run.seconds(steps) / len(steps), a_step


def _savings(off: tuple[float | None, ...], on: tuple[float | None, ...]) -> list[tuple]:
    known = [(0.0, 0.0) if None in pair else pair for pair in zip(off, on, strict=True)]
    return [
        ("gain as published, (off - on) / on", *(_percent(one - other, other) for one, other in known)),
        ("time saved, (off - on) / off", *(_percent(one - other, one) for one, other in known)),
    ]


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.2f} %" if whole else ""


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
