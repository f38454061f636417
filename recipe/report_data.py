"""Reads run directories and computes what the report shows."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from omegaconf import OmegaConf

REWARD = "rollout/reward_all/mean"
STEPS_AT_AN_END = 3  # the reward's gain is that of the last steps' mean over the first steps'


class ReportError(ValueError):
    """A run cannot be reported; one line says why."""


@dataclass
class Run:
    """One run's records. `steps` are its training steps; `metrics[step]` what went to wandb."""

    name: str
    directory: Path
    config: dict
    versions: dict
    metrics: dict[int, dict[str, float]]

    @classmethod
    def load(cls, directory: Path) -> Run:
        path = directory / "metrics.jsonl"
        if not path.is_file():
            raise ReportError(f"{directory}: no metrics.jsonl there; expected a run directory of recipe.main_dapo")
        metrics: dict[int, dict[str, float]] = {}
        for line in path.read_text().splitlines():
            row = json.loads(line)
            metrics.setdefault(row["step"], {}).update(row)
        config = OmegaConf.to_container(OmegaConf.load(directory / "config.yaml"))
        versions = json.loads((directory / "versions.json").read_text())
        run = cls(config["speculation"]["method"], directory, config, versions, metrics)
        if not run.steps:
            raise ReportError(f"{directory}: no training step has finished there")
        return run

    @property
    def steps(self) -> list[int]:
        return sorted(step for step, row in self.metrics.items() if "rollout/seconds" in row)

    def series(self, key: str) -> tuple[list[int], list[float]]:
        points = [(step, row[key]) for step, row in sorted(self.metrics.items()) if key in row]
        return [step for step, _ in points], [value for _, value in points]

    def engine_steps(self, step: int) -> dict[str, np.ndarray]:
        return dict(np.load(self.directory / "engine_steps" / f"{step}.npz"))

    def responses(self, step: int) -> dict[tuple[int, int], list[int]]:
        """(prompt, sample) to response tokens."""
        lines = (self.directory / "rollouts" / f"{step}.jsonl").read_text().splitlines()
        rows = map(json.loads, lines)
        return {(row["prompt"], row["sample"]): row["response_tokens"] for row in rows}

    def seconds(self, steps: list[int]) -> float:
        return sum(self.metrics[step]["rollout/seconds"] for step in steps)

    def tail_seconds(self, steps: list[int], threshold: int) -> float:
        total = 0.0
        for step in steps:
            arrays = self.engine_steps(step)
            total += float(arrays["step_ms"][in_tail(arrays["running"], threshold)].sum()) / 1e3
        return total

    def acceptance_by_position(self) -> tuple[np.ndarray, np.ndarray]:
        """Bin starts (tokens) and mean acceptance length, over all steps; bins with drafts only."""
        parts = [self.engine_steps(step) for step in self.steps]
        verified = sum(part["position_steps"] for part in parts)
        emitted = sum(part["position_emitted"] for part in parts)
        starts = np.arange(len(verified)) * int(parts[0]["position_bin"])
        used = verified > 0
        return starts[used], emitted[used] / verified[used]

    def acceptance_by_draft_position(self) -> np.ndarray:
        parts = [self.engine_steps(step) for step in self.steps]
        drafted = sum(part["drafted_at"] for part in parts)
        return sum(part["accepted_at"] for part in parts) / np.maximum(1, drafted)

    def acceptance(self) -> tuple[float, float]:
        """Mean acceptance length (accepted plus bonus, per verify step of a request) and acceptance rate."""
        parts = [self.engine_steps(step) for step in self.steps]
        verified = sum(int(part["position_steps"].sum()) for part in parts)
        emitted = sum(int(part["position_emitted"].sum()) for part in parts)
        drafted = sum(int(part["drafted"].sum()) for part in parts)
        accepted = sum(int(part["accepted"].sum()) for part in parts)
        return (emitted / verified if verified else 1.0), (accepted / drafted if drafted else 0.0)

    def reward_gain(self) -> float:
        _, rewards = self.series(REWARD)
        return float(np.mean(rewards[-STEPS_AT_AN_END:]) - np.mean(rewards[:STEPS_AT_AN_END]))


def in_tail(running: np.ndarray, threshold: int) -> np.ndarray:
    """Which engine steps belong to a tail: from when running requests first stay at or below `threshold` to the end
    of the generation round. A round begins where running requests rise above the threshold again; the steps on the
    way up are not tail. Without any step above it the whole rollout is tail.

    Args:
        running: int [engine steps]; threshold: requests.

    Returns:
        bool [engine steps].
    """
    above = running > threshold
    if not above.any():
        return np.ones(len(running), dtype=bool)
    tail = ~above
    rising = np.zeros(len(running), dtype=bool)
    for first in np.flatnonzero(above & ~np.concatenate([[False], above[:-1]])):
        step = first - 1
        while step >= 0 and not above[step] and running[step] < running[step + 1]:
            rising[step] = True
            step -= 1
        if step < 0 or (first > 0 and not above[:first].any()):
            rising[:first] = True
    return tail & ~rising


def compare_responses(one: Run, other: Run) -> dict[int, tuple[int, int]]:
    """step -> (identical responses, responses that both runs have)."""
    result = {}
    for step in sorted(set(one.steps) & set(other.steps)):
        mine, theirs = one.responses(step), other.responses(step)
        common = mine.keys() & theirs.keys()
        result[step] = (sum(mine[key] == theirs[key] for key in common), len(common))
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
    """The figures of summary.json; the first run speculates, the second is the baseline."""
    first, second = runs[:2]
    steps = sorted(set(first.steps) & set(second.steps))
    if not steps:
        raise ReportError(f"{first.directory} and {second.directory} have no training step in common")
    threshold = int(first.config["speculation"]["batch_size_threshold"])
    identical = compare_responses(first, second)
    accept_length, accept_rate = first.acceptance()
    return {
        "rollout_speedup_total": second.seconds(steps) / first.seconds(steps),
        "rollout_speedup_tail": second.tail_seconds(steps, threshold) / first.tail_seconds(steps, threshold),
        "accept_length": accept_length,
        "accept_rate": accept_rate,
        "reward_gain_sam": first.reward_gain(),
        "reward_gain_off": second.reward_gain(),
        "identical_responses": sum(same for same, _ in identical.values()),
        "total_responses": sum(total for _, total in identical.values()),
        "identical_by_step": {str(step): list(counts) for step, counts in identical.items()},
        "steps": len(steps),
        "tail_threshold": threshold,
        "seconds": {
            run.name: {
                "rollout": run.seconds(run.steps),
                "tail": run.tail_seconds(run.steps, threshold),
                "training": _fit_seconds(run),
            }
            for run in runs
        },
        "peak_memory_gib": _peak_memory(runs),
        "versions": first.versions,
        "runs": [str(run.directory) for run in runs],
    }


def _fit_seconds(run: Run) -> float:
    return float(sum(row.get("timing_s/step", 0.0) for row in run.metrics.values()))


def _peak_memory(runs: list[Run]) -> float | None:
    paths = [run.directory / "peak_memory.json" for run in runs]
    peaks = [json.loads(path.read_text())["peak_memory_gib"] for path in paths if path.is_file()]
    return max(peaks, default=None)
