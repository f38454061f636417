"""Where the seconds of a training step go: phases that follow each other, and the rollout inside one of them."""

from typing import NamedTuple

import numpy as np

from recipe.sam_dapo.report.runs import ROLLOUT_SECONDS, TAIL_SECONDS, Run, common_steps

STEP = "training step"
GEN = "gen"
ROLLOUT = "rollout"
TAIL = "rollout's tail"
REST = "rest of the step"
TIMED = "timing_s/"  # verl's keys
OUTSIDE = ("testing", "dump_rollout_generations")  # which verl times beside its step
ERRORS = 2.0  # standard errors of a mean over the steps, up to which a difference is noise
LEAST_SHARE = 0.01  # of a training step, below which a difference is none


class Phase(NamedTuple):
    """A phase's seconds, float [steps, runs], 0 where a step has none. `depth` 0: phases follow each other and make up
    a step; 1 and 2: inside the phase before."""

    name: str
    seconds: np.ndarray
    depth: int = 0

    @property
    def means(self) -> np.ndarray:
        """float [runs]: seconds of a training step."""
        return self.seconds.mean(axis=0)


class Gain(NamedTuple):
    """What a phase of the first run saves: seconds of a step, and their share of the baseline's.

    `times`: the baseline's mean over the first run's, the least and the most of a step; None where none has both.
    """

    saved: float
    share: float
    times: tuple[float, float, float] | None
    is_noise: bool


def values(runs: list[Run], key: str) -> np.ndarray:
    """float [steps, runs]: a figure in the training steps of which all runs have it."""
    rows = [[run.metrics[step].get(key) for run in runs] for step in common_steps(runs)]
    return np.array([row for row in rows if None not in row])


def phases_of(runs: list[Run]) -> list[Phase]:
    """The training step, then its phases, longest first but generation before all, each with what is inside it."""
    steps = common_steps(runs)
    timed = {key for run in runs for step in steps for key in run.metrics[step] if key.startswith(TIMED)}
    names = {key.removeprefix(TIMED) for key in timed} - {"step", *OUTSIDE}

    def seconds(key: str) -> np.ndarray:
        return np.array([[run.metrics[step].get(key, 0.0) for run in runs] for step in steps])

    parts = [Phase(name, seconds(TIMED + name)) for name in names if "/" not in name]
    parts.sort(key=lambda part: (part.name != GEN, -part.means[-1], part.name))
    inside = _inside_generation(runs, seconds, depth=int(GEN in names))
    if f"{TIMED}step" not in timed:
        return inside
    whole = seconds(f"{TIMED}step")
    rest = whole - sum(part.seconds for part in parts)
    if parts and rest.mean() > 0:
        parts.append(Phase(REST, np.maximum(rest, 0.0)))
    return [Phase(STEP, whole), *parts[:1], *inside, *parts[1:]]


def _inside_generation(runs: list[Run], seconds, depth: int) -> list[Phase]:
    parts = [Phase(ROLLOUT, seconds(ROLLOUT_SECONDS), depth)]
    thresholds = {run.threshold() for run in runs}
    are_alike = len(thresholds) == 1 and None not in thresholds
    tail = seconds(TAIL_SECONDS)
    if are_alike and tail.any(axis=0).all():
        parts.append(Phase(TAIL, tail, depth + 1))
    return parts


def gain_of(phase: Phase, step: Phase | None) -> Gain:
    """What the first run saves over the second; `step`: the training step."""
    first, baseline = phase.seconds.T
    apart = baseline - first
    saved = float(apart.mean())
    error = float(apart.std(ddof=1)) / len(apart) ** 0.5 if len(apart) > 1 else 0.0
    least = LEAST_SHARE * float(step.means[1]) if step else 0.0
    times = None
    timed = (first > 0) & (baseline > 0)
    if timed.any():
        by_step = baseline[timed] / first[timed]
        times = float(baseline.mean() / first.mean()), float(by_step.min()), float(by_step.max())
    share = saved / float(baseline.mean()) if baseline.any() else 0.0
    return Gain(saved, share, times, abs(saved) <= ERRORS * error or abs(saved) < least)


def times_as_fast(gain: Gain) -> str:
    """Mean, and range over the steps."""
    return "{:.2f}x ({:.2f}-{:.2f})".format(*gain.times) if gain.times else "-"


def table_of_phases(runs: list[Run]) -> tuple[tuple, list[tuple]]:
    """Header and rows: seconds of a step, baseline first, what is saved, and one row for all that did not change."""
    phases = phases_of(runs[:2])
    whole = next((phase for phase in phases if phase.name == STEP), None)
    names = [run.name for run in reversed(runs[:2])]
    if len(names) == 1:
        return ("seconds a step", *names), [(_indented(phase), f"{phase.means[0]:.2f}") for phase in phases]
    rows = []
    unchanged = []
    for phase in phases:
        gain = gain_of(phase, whole)
        if gain.is_noise and phase.depth == 0 and phase.name != STEP:
            unchanged.append(phase)
            continue
        saved = f"{gain.saved:.2f} s, {100 * gain.share:.1f} %"
        rows.append((_indented(phase), *_seconds(phase.means), saved, times_as_fast(gain)))
    if unchanged:
        label = f"unchanged within noise: {', '.join(phase.name for phase in unchanged)}"
        rows.append((label, *_seconds(sum(phase.means for phase in unchanged)), "-", "-"))
    return ("seconds a step", *names, "saved", "times as fast (by step)"), rows


def _seconds(means: np.ndarray) -> tuple[str, ...]:
    return tuple(f"{mean:.2f}" for mean in reversed(means))


def _indented(phase: Phase) -> str:
    return f"{'· ' * phase.depth}{phase.name}"


def outside_of_steps(runs: list[Run]) -> list[str]:
    """Names and seconds of what verl times beside its step, in the steps that have it."""
    lines = []
    for name in OUTSIDE:
        rows = values(runs[:2], TIMED + name)
        if len(rows):
            seconds = " and ".join(f"{mean:.2f} s ({run.name})" for mean, run in zip(rows.mean(0), runs, strict=False))
            lines.append(f"{name} comes on top: {seconds}, mean of the steps that have it: {len(rows)}")
    return lines
