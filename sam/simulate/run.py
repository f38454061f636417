"""A recorded training run as the simulator reads it: responses and when they arrived, engine steps, settings."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from sam.config import WITH_DRAFT_MODEL, SpeculationConfig
from sam.reading import ReadError, expect, one_line
from sam.record.engine_steps import EngineSteps
from sam.record.responses import by_prompt
from sam.record.run_directory import (
    CONFIG_FILE,
    METRICS_FILE,
    Response,
    read_config,
    read_metrics,
    read_responses,
    responses_path,
)
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
            ReadError: no such run, something in it cannot be read, or none of its training steps is recorded.
        """
        for name in (CONFIG_FILE, METRICS_FILE):
            if not (directory / name).is_file():
                raise ReadError(f"{directory}: no {name} there; expected a run directory of recipe.main_dapo")
        config = read_config(directory)
        with one_line(place := str(directory / CONFIG_FILE), "not this version's settings"):
            SpeculationConfig.from_dict(config["speculation"])
            sections = config["actor_rollout_ref"]["rollout"], config.get("trainer", {})
        expect(all(isinstance(one, dict) for one in sections), place, "settings of rollout and trainer", sections)
        key = "rollout/seconds"
        measured = {step: row[key] for step, row in read_metrics(directory).items() if row.get(key, 0) > 0}
        needed = {step: (EngineSteps.path(directory, step), responses_path(directory, step)) for step in measured}
        seconds = {step: measured[step] for step in sorted(needed) if all(path.is_file() for path in needed[step])}
        if not seconds:
            raise ReadError(f"{directory}: no training step with rollouts/ and engine_steps/ has finished there")
        return cls(directory, config, seconds)

    @property
    def speculation(self) -> SpeculationConfig:
        return SpeculationConfig.from_dict(self.config["speculation"])

    @property
    def is_simulated(self) -> bool:
        """Whether its rollouts can be simulated as they ran: without a trained drafter."""
        return self.speculation.method not in WITH_DRAFT_MODEL

    @property
    def choice(self) -> Choice:
        """The run's own settings; ngram and suffix have no switch.

        Raises:
            ValueError: the run had a trained drafter.
        """
        speculation = self.speculation
        if not self.is_simulated:
            raise ValueError(f"{self.directory}: trained drafters, as of {speculation.method}, are not simulated")
        own = speculation.policy if speculation.method == "sam" else "always"
        policy = "never" if speculation.method == "off" else own
        return Choice(
            policy,
            speculation.num_speculative_tokens,
            speculation.batch_size_threshold,
            speculation.hysteresis,
            "request" if speculation.method == "ngram" else speculation.scope,
        )

    def cluster(self, admit_ms: float) -> Cluster:
        rollout, trainer = self.config["actor_rollout_ref"]["rollout"], self.config.get("trainer", {})
        ranks = self._number(rollout, "data_parallel_size")
        world = self._number(trainer, "nnodes") * self._number(trainer, "n_gpus_per_node")
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size")
        one = ranks * math.prod(self._number(rollout, name) for name in names)
        engines = max(1, world // one)
        if ranks > 1 and engines > 1:
            raise ValueError(f"{self.directory}: {engines} engines of {ranks} data-parallel ranks: not simulated yet")
        seqs = self._number(rollout, "max_num_seqs", 1024)
        return Cluster(max(ranks, engines), seqs, dp_synchronous=ranks > 1, admit_ms=admit_ms)

    def _number(self, section: dict, key: str, default: int = 1) -> int:
        value = default if section.get(key) is None else section[key]
        expect(type(value) is int and value > 0, f"{self.directory / CONFIG_FILE}, {key}", "a number above 0", value)
        return value

    def engine_steps(self, step: int) -> EngineSteps:
        return EngineSteps.load(self.directory, step)

    def rounds(self, step: int) -> list[tuple[Round, EngineSteps]]:
        """A training step's rounds of generation with the arrivals that its first replica saw, and that one's engine
        steps."""
        rows = read_responses(self.directory, step)
        numbers = sorted({row.round for row in rows})
        parts, path = self.engine_steps(step).split_rounds(len(numbers)), EngineSteps.path(self.directory, step)
        is_whole = len(parts) == len(numbers) and all(part.running.any() for part in parts)
        expect(is_whole, str(path), f"steps with requests in each of {len(numbers)} generation rounds", len(parts))
        return [
            (_round([row for row in rows if row.round == number], part), part)
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


def _round(rows: list[Response], steps: EngineSteps) -> Round:
    recording = by_prompt((row.prompt_tokens, row.response_tokens) for row in rows)
    count = sum(len(text) > 0 for samples in recording.responses for text in samples)
    return recorded_round(recording, arrivals(steps, count))
