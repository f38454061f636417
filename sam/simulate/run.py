"""A recorded training run as the simulator reads it: responses and when they arrived, engine steps, settings."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from sam.config import WITH_DRAFT_MODEL, SpeculationConfig
from sam.record.engine_steps import EngineSteps
from sam.record.responses import by_prompt
from sam.simulate.engine import Cluster
from sam.simulate.fit import FittedCost, fit_from_steps
from sam.simulate.lengths import Round, recorded_round
from sam.simulate.rollout import Choice


@dataclass(frozen=True)
class RecordedRun:
    """A run directory of recipe.main_dapo.

    Attributes:
        config: the run's config.yaml.
        seconds: training step -> its rollout's seconds, for the steps whose responses and engine steps are there.
    """

    directory: Path
    config: dict
    seconds: dict[int, float]

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read a run directory.

        Raises:
            ValueError: no such run, or none of its training steps is recorded.
        """
        try:
            import yaml
        except ImportError as error:
            raise ValueError("reading a run's config.yaml needs PyYAML: install requirements/cpu.txt") from error
        for name in ("config.yaml", "metrics.jsonl"):
            if not (directory / name).is_file():
                raise ValueError(f"{directory}: no {name} there; expected a run directory of recipe.main_dapo")
        try:
            config = yaml.safe_load((directory / "config.yaml").read_text())
            SpeculationConfig.from_dict(config["speculation"]), config["actor_rollout_ref"]["rollout"]
            lines = (directory / "metrics.jsonl").read_text().splitlines(keepends=True)
            rows = [json.loads(line) for line in lines if line.endswith("\n")]
        except (yaml.YAMLError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{directory}: not a run directory of recipe.main_dapo ({error!r})") from error
        measured = {row["step"]: row["rollout/seconds"] for row in rows if "rollout/seconds" in row}
        needed = {step: (EngineSteps.path(directory, step), _responses(directory, step)) for step in sorted(measured)}
        seconds = {step: measured[step] for step, paths in needed.items() if all(path.is_file() for path in paths)}
        if not seconds:
            raise ValueError(f"{directory}: no training step with rollouts/ and engine_steps/ has finished there")
        return cls(directory, config, seconds)

    @property
    def speculation(self) -> SpeculationConfig:
        return SpeculationConfig.from_dict(self.config["speculation"])

    @property
    def rotated(self) -> bool:
        """Whether the run rotated policies, as runs of recipe.turns do."""
        return bool(self.speculation.policy_rotation)

    @property
    def choice(self) -> Choice:
        """The run's own settings; ngram and suffix have no switch.

        Raises:
            ValueError: the run rotated policies.
        """
        if self.rotated:
            raise ValueError(f"{self.directory}: it rotated policies: expected a run of one policy")
        speculation = self.speculation
        own = speculation.policy if speculation.method in ("sam", *WITH_DRAFT_MODEL) else "always"
        policy = "never" if speculation.method == "off" else own
        return Choice(
            policy,
            speculation.num_speculative_tokens,
            speculation.batch_size_threshold,
            speculation.hysteresis,
            "request" if speculation.method == "ngram" else speculation.scope,
            knows_cost=True,  # measured when the engine starts, then corrected: the fitted table is what it comes to
            drafter="sam" if speculation.method == "off" else speculation.method,
        )

    def cluster(self, admit_ms: float) -> Cluster:
        rollout, trainer = self.config["actor_rollout_ref"]["rollout"], self.config.get("trainer", {})
        ranks = _number(rollout, "data_parallel_size")
        world = _number(trainer, "nnodes") * _number(trainer, "n_gpus_per_node")
        one = ranks * _number(rollout, "tensor_model_parallel_size") * _number(rollout, "pipeline_model_parallel_size")
        engines = max(1, world // one)
        if ranks > 1 and engines > 1:
            raise ValueError(f"{self.directory}: {engines} engines of {ranks} data-parallel ranks: not simulated yet")
        seqs = _number(rollout, "max_num_seqs", 1024)
        return Cluster(max(ranks, engines), seqs, dp_synchronous=ranks > 1, admit_ms=admit_ms)

    def engine_steps(self, step: int) -> EngineSteps:
        return EngineSteps.load(self.directory, step)

    def rounds(self, step: int) -> list[tuple[Round, EngineSteps]]:
        """A training step's rounds of generation with the arrivals that its first replica saw, and that one's engine
        steps."""
        rows = [json.loads(line) for line in _responses(self.directory, step).read_text().splitlines()]
        numbers = sorted({row.get("round", 0) for row in rows})
        parts = self.engine_steps(step).split_rounds(len(numbers))
        return [
            (_round([row for row in rows if row.get("round", 0) == number], part), part)
            for number, part in zip(numbers, parts, strict=True)
        ]


def fit_runs(runs: list[RecordedRun]) -> tuple[FittedCost, float]:
    """Step costs from all recorded engine steps of runs of one machine, and the milliseconds of a round in which no
    engine step runs.

    Raises:
        ValueError: too few steps.
    """
    parts, idle, count = [], 0.0, 0
    for run in runs:
        slots = run.cluster(0.0)
        for step, seconds in run.seconds.items():
            idle += seconds
            for work, steps in run.rounds(step):
                came = np.maximum(0, np.diff(steps.running, prepend=0))
                together = len(work) <= slots.replicas * slots.max_num_seqs
                context = _context(steps, work) if together else np.zeros(len(came))
                parts.append((steps.running, steps.drafted, steps.step_ms, came, context))
                idle -= steps.seconds
                count += 1
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    return fit_from_steps(*columns), max(0.0, 1e3 * idle / count)


def _context(steps: EngineSteps, work: Round) -> np.ndarray:
    """Mean tokens of a request before each step, if all began together."""
    each = steps.emitted / np.maximum(1, steps.running)
    return work.prompt_tokens.mean() + np.concatenate([[0.0], np.cumsum(each)[:-1]])


def arrivals(steps: EngineSteps, requests: int) -> np.ndarray:
    """float64 [requests], milliseconds after the first step began at which requests were there.

    Running requests rise while they come. What has not come when they are most has waited, or come in the place of
    those that had finished: it is spread over the same time.
    """
    top = int(np.argmax(steps.running)) + 1
    came = np.cumsum(np.maximum(0, np.diff(steps.running[:top], prepend=0)))
    at = np.searchsorted(came, (np.arange(requests) + 0.5) * came[-1] / requests)
    return 1e3 * (steps.start_s[at] - steps.start_s[0])


def _round(rows: list[dict], steps: EngineSteps) -> Round:
    recording = by_prompt((row["prompt_tokens"], row["response_tokens"]) for row in rows)
    count = sum(len(text) > 0 for samples in recording.responses for text in samples)
    return recorded_round(recording, arrivals(steps, count))


def _responses(directory: Path, step: int) -> Path:
    return directory / "rollouts" / f"{step}.jsonl"


def _number(section: dict, key: str, default: int = 1) -> int:
    value = section.get(key)
    return value if isinstance(value, int) and value > 0 else default
