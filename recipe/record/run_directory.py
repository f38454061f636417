"""The files of a run beside verl's own logs: responses as token ids, engine steps, metrics, its state."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from recipe.seeds import parse_prompt_uid, sample_seed
from sam.record.atomic import replacing

STATE_FILE = "state.json"
METRICS_FILE = "metrics.jsonl"
LOCK_FILE = "running.json"  # there while a run goes on


class RunRecord:
    """Writes below a run's directory; every file appears whole or not at all.

    rollouts/<step>.jsonl: one response per line, in dispatch order, kept or dropped.
    engine_steps/<step>.npz: sam.record.engine_steps.EngineSteps of the first replica.
    metrics.jsonl: one object per training step, everything that goes to wandb; step 0 is the first validation.
    state.json: the phase the run is in, for the supervisor.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        for name in ("rollouts", "engine_steps"):
            (directory / name).mkdir(parents=True, exist_ok=True)

    def start(self, first_step: int) -> None:
        """Drop the metrics that an interrupted run wrote from `first_step` on: those steps are repeated."""
        path = self.directory / METRICS_FILE
        if path.exists():
            lines = [line for line in path.read_text().splitlines() if json.loads(line)["step"] < first_step]
            _write(path, "".join(line + "\n" for line in lines).encode())

    def append_metrics(self, step: int, metrics: dict) -> None:
        """Append the numbers among a step's metrics to metrics.jsonl."""
        values = {key: float(value) for key, value in metrics.items() if _is_scalar(value)}
        with open(self.directory / METRICS_FILE, "a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    def write_rollouts(self, step: int, sampled, run_seed: int) -> None:
        """Write a step's responses (recipe.trainer.dynamic_sampling.SampledStep) to rollouts/<step>.jsonl."""
        lines = []
        for trajectory in sampled.trajectories:
            _, prompt = parse_prompt_uid(trajectory.uid)
            row = {
                "prompt": prompt,
                "sample": trajectory.sample,
                "round": trajectory.round,
                "kept": trajectory.kept,
                "seed": sample_seed(run_seed, "train", step, prompt, trajectory.sample),
                "prompt_tokens": trajectory.prompt_tokens,
                "response_tokens": trajectory.response_tokens,
                "reward": trajectory.reward,
                "acc": trajectory.metrics.get("acc", 0.0),
            }
            lines.append(json.dumps(row))
        _write(self.directory / "rollouts" / f"{step}.jsonl", ("\n".join(lines) + "\n").encode())

    def write_engine_steps(self, step: int, record) -> None:
        """Write the first replica's steps of a RolloutRecord to engine_steps/<step>.npz."""
        record.replicas[0].save(self.directory, step)

    @contextmanager
    def phase(self, name: str):
        """Mark a phase in which a dead engine makes verl wait for ever; the supervisor ends it after a limit."""
        self._write_state({"phase": name, "since": time.time()})
        try:
            yield
        finally:
            self._write_state({"phase": "running", "since": time.time()})

    def finish(self, seconds: float) -> None:
        """Mark the run as finished after `seconds` of training."""
        self._write_state({"phase": "finished", "since": time.time(), "fit_seconds": seconds})

    def _write_state(self, state: dict) -> None:
        _write(self.directory / STATE_FILE, json.dumps(state).encode())


def _write(path: Path, content: bytes) -> None:
    with replacing(path) as partial:
        partial.write_bytes(content)


def _is_scalar(value) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
