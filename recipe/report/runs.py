"""Reads run directories and computes what the report shows.

A run of wandb (recipe.report.wandb_reader) is the same without engine steps and responses; figures that need them are
None then.
"""

from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np

from sam.reading import ReadError, expect, json_object
from sam.record.engine_steps import HISTOGRAMS, EngineSteps
from sam.record.run_directory import (
    METRICS_FILE,
    Response,
    finite,
    read_config,
    read_metrics,
    read_responses,
    responses_path,
)

REWARD = "rollout/reward_all/mean"
# The server's own clock, and verl's, which waits in steps of two seconds but is in every run of verl's.
ROLLOUT_SECONDS = ("rollout/seconds", "timing_s/gen")
TAIL = ("rollout/tail_seconds", "rollout/tail_share")
STEPS_AT_AN_END = 3  # the reward's gain is that of the last steps' mean over the first steps'
LEFT_OUT = ": left out"


class ReportError(ReadError):
    """A run cannot be reported; one line says why."""


@contextmanager
def left_out(remarks: list[str]):
    """Report without what cannot be read, whose line becomes a remark."""
    try:
        yield
    except ReadError as error:
        if (line := f"{error}{LEFT_OUT}") not in remarks:
            remarks.append(line)


@dataclass
class Run:
    """One run's records.

    Attributes:
        name: its speculation's method, as far as the config says it.
        source: what the user named it by: a directory, or entity/project/run_id.
        metrics: training step -> what went to wandb; step 0 is the first validation.
        directory: has engine steps and responses; None for a run of wandb, which has neither.
        rollout_key: the metric that `seconds` adds up, one of ROLLOUT_SECONDS.
        remarks: what a reader of its figures should know.
    """

    name: str
    source: str
    config: dict
    versions: dict
    metrics: dict[int, dict[str, float]]
    directory: Path | None = None
    rollout_key: str = ROLLOUT_SECONDS[0]
    remarks: list[str] = field(default_factory=list)

    def __post_init__(self):
        self._engine_steps: dict[int, EngineSteps] | None = None
        self.metrics = {step: finite(row) for step, row in self.metrics.items()}
        if not any(key in row for row in self.metrics.values() for key in ROLLOUT_SECONDS):
            raise ReportError(
                f"{self.source}: no training step has finished there (no step has {' or '.join(ROLLOUT_SECONDS)}): "
                "name a run that has trained"
            )

    @classmethod
    def load(cls, directory: Path, is_whole: bool = True) -> Self:
        """Read a run directory of recipe.main_dapo.

        Raises:
            ReportError: no step has finished there; or something cannot be read, which without `is_whole` becomes a
                remark.
        """
        if not (directory / METRICS_FILE).is_file():
            raise ReportError(f"{directory}: no {METRICS_FILE} there; expected a run directory of recipe.main_dapo")
        config, versions, rows, remarks = {}, {}, [], []
        with left_out(remarks):
            metrics = read_metrics(directory, rows)
        with left_out(remarks):
            config = read_config(directory)
        with left_out(remarks):
            versions = json_object(directory / "versions.json")
        remarks += [line + LEFT_OUT for line in rows]
        if is_whole and remarks:
            raise ReportError(remarks[0].removesuffix(LEFT_OUT))
        name = config["speculation"]["method"] if config else directory.name
        return cls(name, str(directory), config, versions, metrics, directory, remarks=remarks)

    @property
    def steps(self) -> list[int]:
        return sorted(step for step, row in self.metrics.items() if self.rollout_key in row)

    @property
    def has_engine_steps(self) -> bool:
        """Whether those of all steps can be read, and can be added up."""
        if self._engine_steps is None:
            self._engine_steps = {}
            if self._has_files(EngineSteps.path):
                with left_out(self.remarks):
                    self._engine_steps = self._read_engine_steps()
        return bool(self._engine_steps)

    def _read_engine_steps(self) -> dict[int, EngineSteps]:
        found = {step: EngineSteps.load(self.directory, step) for step in self.steps}
        first = next(iter(found.values()))
        for step, one in found.items():
            place = str(EngineSteps.path(self.directory, step))
            expect(len(one) > 0, place, "engine steps", "none")
            for name in HISTOGRAMS:
                lengths = len(getattr(first, name)), len(getattr(one, name))
                expect(
                    lengths[0] == lengths[1],
                    f"{place}, {name}",
                    f"{lengths[0]} values as in the first step",
                    lengths[1],
                )
            expect(one.position_bin == first.position_bin, place, f"bins of {first.position_bin}", one.position_bin)
        return found

    @property
    def has_responses(self) -> bool:
        return self._has_files(responses_path)

    def _has_files(self, path: Callable[[Path, int], Path]) -> bool:
        return self.directory is not None and all(path(self.directory, step).is_file() for step in self.steps)

    def speculation(self, key: str) -> int | None:
        """A number of the config's `speculation` section; None where the run's config has none."""
        value = (self.config.get("speculation") or {}).get(key)
        expect(value is None or type(value) is int, f"{self.source}, speculation.{key}", "a whole number", value)
        return value

    def series(self, key: str) -> tuple[list[int], list[float]]:
        points = [(step, row[key]) for step, row in sorted(self.metrics.items()) if key in row]
        return [step for step, _ in points], [value for _, value in points]

    def engine_steps(self, step: int) -> EngineSteps:
        """Those of a step, of a run that `has_engine_steps` kept."""
        return (self._engine_steps or {}).get(step) or EngineSteps.load(self.directory, step)

    def responses(self, step: int) -> list[Response]:
        """Those of a step; none, and a remark, where they cannot be read."""
        with left_out(self.remarks):
            return read_responses(self.directory, step)
        return []

    def column(self, key: str, steps: list[int]) -> np.ndarray:
        return np.array([self.metrics[step][key] for step in steps])

    def seconds(self, steps: list[int]) -> float:
        return float(self.column(self.rollout_key, steps).sum())

    def has(self, key: str | Iterable[str], steps: list[int]) -> bool:
        """Whether all steps have a figure, or all of several."""
        keys = [key] if isinstance(key, str) else list(key)
        return all(key in self.metrics[step] for step in steps for key in keys)

    def tail(self, steps: list[int], threshold: int | None) -> tuple[float, float] | None:
        """Seconds of `steps` with at most `threshold` requests running, their share of the rollout; None if unknown.

        The run's own metrics are means of all replicas, the engine steps on disk are the first replica's.
        """
        if threshold is None:
            return None
        if threshold == self.speculation("batch_size_threshold") and self.has(TAIL, steps):
            of_tail = self.column("rollout/tail_share", steps) * self.column(self.rollout_key, steps)
            return float(self.column("rollout/tail_seconds", steps).sum()), of_tail.sum() / self.seconds(steps)
        if not self.has_engine_steps:
            return None
        parts = [self.engine_steps(step) for step in steps]
        tail = sum(float(part.step_ms[part.in_tail(threshold)].sum()) for part in parts)
        return tail / 1e3, tail / sum(float(part.step_ms.sum()) for part in parts)

    def tail_seconds(self, steps: list[int], threshold: int | None) -> float | None:
        tail = self.tail(steps, threshold)
        return tail and tail[0]

    def acceptance_by_position(self) -> tuple[np.ndarray, np.ndarray]:
        """Bin starts (tokens) and mean acceptance length, over all steps; bins with drafts only."""
        parts = [self.engine_steps(step) for step in self.steps]
        verified = sum(part.position_steps for part in parts)
        emitted = sum(part.position_emitted for part in parts)
        starts = np.arange(len(verified)) * parts[0].position_bin
        used = verified > 0
        return starts[used], emitted[used] / verified[used]

    def acceptance_by_draft_position(self) -> np.ndarray:
        parts = [self.engine_steps(step) for step in self.steps]
        drafted = sum(part.drafted_at for part in parts)
        return sum(part.accepted_at for part in parts) / np.maximum(1, drafted)

    def acceptance(self) -> tuple[float | None, float | None]:
        """Mean acceptance length (accepted plus bonus, per verify step of a request) and acceptance rate."""
        names = ("accept_length", "verify_steps", "accepted_tokens", "drafted_tokens")
        keys = [f"rollout/spec_{name}" for name in names]
        if self.has(keys, self.steps):
            length, *columns = (self.column(key, self.steps) for key in keys)
            columns.insert(0, length * columns[0])
        elif self.has_engine_steps:
            parts = [self.engine_steps(step) for step in self.steps]
            names = ("position_emitted", "position_steps", "accepted", "drafted")
            columns = [np.array([getattr(part, name).sum() for part in parts]) for name in names]
        else:
            return None, None
        emitted, verified, accepted, drafted = (float(column.sum()) for column in columns)
        return (emitted / verified if verified else 1.0), (accepted / drafted if drafted else 0.0)

    def is_asynchronous(self) -> bool | None:
        """Whether its engines scheduled asynchronously in all steps; None if that is not recorded."""
        key = "rollout/asynchronous_scheduling"
        return bool(self.column(key, self.steps).all()) if self.has(key, self.steps) else None

    def graph_replay(self) -> dict[str, tuple[int, float | None]] | None:
        """By phase, the number of engine steps and the share that replayed a graph: no share without graphs or without
        steps. None if that is not recorded."""
        count = "rollout/steps_with_drafts"
        if not self.has((count, "rollout/engine_steps"), self.steps):
            return None
        drafted, phases = self.column(count, self.steps), {}
        steps = {"with_drafts": drafted, "without_drafts": self.column("rollout/engine_steps", self.steps) - drafted}
        for phase, counts in steps.items():
            shares = [self.metrics[step].get(f"rollout/graph_share/{phase}") for step in self.steps]
            replayed = sum(share * n for share, n in zip(shares, counts, strict=True) if share is not None)
            has_graphs = any(share is not None for share in shares)
            phases[phase] = int(counts.sum()), float(replayed / counts.sum()) if has_graphs else None
        return phases

    def reward_gain(self) -> float | None:
        _, rewards = self.series(REWARD)
        return float(np.mean(rewards[-STEPS_AT_AN_END:]) - np.mean(rewards[:STEPS_AT_AN_END])) if rewards else None


def make_comparable(runs: list[Run]) -> None:
    """Give the runs different names, and one measure of rollout time, which all of them have."""
    names: list[str] = []
    for run in runs:
        names.append(run.name)
        if (count := names.count(run.name)) > 1:
            run.name = f"{run.name} {count}"
    for key in ROLLOUT_SECONDS:
        if all(any(key in row for row in run.metrics.values()) for run in runs):
            for run in runs:
                run.rollout_key = key
            return
    raise ReportError(
        f"{' and '.join(run.source for run in runs)}: no measure of rollout time in common; expected "
        f"{' or '.join(ROLLOUT_SECONDS)} in all of them: compare runs of verl's V1 trainer"
    )


def compare_responses(one: Run, other: Run) -> dict[int, tuple[int, int]]:
    """step -> (identical responses, responses that both runs have); empty where a run has not recorded them."""
    result = {}
    if not (one.has_responses and other.has_responses):
        return result
    for step in sorted(set(one.steps) & set(other.steps)):
        mine, theirs = (
            {(row.prompt, row.sample): row.response_tokens for row in run.responses(step)} for run in (one, other)
        )
        if not (mine and theirs):
            continue
        common = mine.keys() & theirs.keys()
        result[step] = (sum(np.array_equal(mine[key], theirs[key]) for key in common), len(common))
    return result


def config_difference(one: dict, other: dict, prefix: str = "") -> dict[str, tuple]:
    """Keys whose values differ, dotted."""
    difference = {}
    for key in sorted(one.keys() | other.keys()):
        mine, theirs = one.get(key), other.get(key)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            difference |= config_difference(mine, theirs, f"{prefix}{key}.")
        elif mine != theirs:
            difference[f"{prefix}{key}"] = (mine, theirs)
    return difference


def summarize(runs: list[Run]) -> dict:
    """The figures of summary.json; the first run speculates, the second is the baseline. None is: not recorded."""
    first, second = runs[:2]
    steps = common_steps(first, second)
    threshold = first.speculation("batch_size_threshold")
    identical = compare_responses(first, second)
    accept_length, accept_rate = first.acceptance()
    return {
        "rollout_speedup_total": _ratio(second.seconds(steps), first.seconds(steps)),
        "rollout_speedup_tail": _ratio(second.tail_seconds(steps, threshold), first.tail_seconds(steps, threshold)),
        "accept_length": accept_length,
        "accept_rate": accept_rate,
        "reward_gain_sam": first.reward_gain(),
        "reward_gain_off": second.reward_gain(),
        "identical_responses": sum(same for same, _ in identical.values()) if identical else None,
        "total_responses": sum(total for _, total in identical.values()),
        "identical_by_step": {str(step): list(counts) for step, counts in identical.items()},
        "steps": len(steps),
        "tail_threshold": threshold,
        "seconds": {
            run.name: {
                "rollout": run.seconds(run.steps),
                "tail": run.tail_seconds(run.steps, threshold),
                "training": float(sum(row.get("timing_s/step", 0.0) for row in run.metrics.values())),
            }
            for run in runs
        },
        "asynchronous_scheduling": {run.name: run.is_asynchronous() for run in runs},
        "graph_replay": {run.name: run.graph_replay() for run in runs},
        "peak_memory_gib": _peak_memory(runs),
        "versions": first.versions,
        "runs": [run.source for run in runs],
    }


def common_steps(first: Run, second: Run) -> list[int]:
    steps = sorted(set(first.steps) & set(second.steps))
    if not steps:
        raise ReportError(
            f"{first.source} and {second.source} have no training step in common (they have {first.steps[0]} to "
            f"{first.steps[-1]} and {second.steps[0]} to {second.steps[-1]}): name runs that began alike"
        )
    return steps


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


def _peak_memory(runs: list[Run]) -> float | None:
    peaks = []
    for run in runs:
        if run.directory and (path := run.directory / "peak_memory.json").is_file():
            with left_out(run.remarks):
                peak = json_object(path).get("peak_memory_gib")
                expect(type(peak) in (int, float), f"{path}, peak_memory_gib", "a number", peak)
                peaks.append(peak)
    return max(peaks, default=None)
