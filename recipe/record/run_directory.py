"""The files of a run beside verl's own logs: responses as token ids, engine steps, metrics, its state."""

import json
import time
from contextlib import contextmanager, suppress
from numbers import Real
from pathlib import Path

from recipe.seeds import parse_prompt_uid, sample_seed
from sam.reading import ReadError, json_object
from sam.record import run_directory as run_files
from sam.record.atomic import replacing
from sam.record.run_directory import METRICS_FILE, responses_path

STATE_FILE = "state.json"
LOCK_FILE = "running.json"  # there while a run goes on
TRAJECTORY = ("sample", "round", "kept", "prompt_tokens", "response_tokens", "reward")  # written as they are
# Phases that state.json names, beside weight_sync, which may hang, and finished.
STARTING_RAY, STARTING_WORKERS, STARTING_ENGINES = "starting Ray", "starting the workers", "starting the engines"
VALIDATING, RUNNING = "first validation", "running"


def read_json(path: Path) -> dict:
    """What a file holds; nothing where it is missing or written by halves."""
    with suppress(ReadError):
        return json_object(path)
    return {}


def read_metrics(run_directory: Path) -> dict[int, dict[str, float]]:
    """Training step to its figures, without rows that a full disk has left by halves; empty before the first one."""
    with suppress(ReadError):
        return run_files.read_metrics(run_directory, left_out=[])
    return {}


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
            kept = {step: row for step, row in read_metrics(self.directory).items() if step < first_step}
            _write_lines(path, [{"step": step, **row} for step, row in kept.items()])

    def append_metrics(self, step: int, metrics: dict) -> None:
        """Append the numbers among a step's metrics to metrics.jsonl."""
        numbers = {key: value for key, value in metrics.items() if isinstance(value, Real) and type(value) is not bool}
        values = {key: float(value) for key, value in numbers.items()}
        with open(self.directory / METRICS_FILE, "a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    def write_rollouts(self, step: int, sampled, run_seed: int) -> None:
        """Write a step's responses (recipe.trainer.dynamic_sampling.SampledStep) to rollouts/<step>.jsonl."""
        rows = []
        for one in sampled.trajectories:
            prompt = parse_prompt_uid(one.uid)[1]
            row = {name: getattr(one, name) for name in TRAJECTORY}
            row |= {"prompt": prompt, "seed": sample_seed(run_seed, "train", step, prompt, one.sample)}
            rows.append(row | {"acc": one.metrics.get("acc", 0.0)})
        _write_lines(responses_path(self.directory, step), rows)

    def write_engine_steps(self, step: int, record) -> None:
        """Write the first replica's steps of a RolloutRecord to engine_steps/<step>.npz."""
        record.replicas[0].save(self.directory, step)

    def enter(self, phase: str) -> None:
        """Say which phase begins, to the supervisor and to who looks at the screen."""
        self._write_state({"phase": phase, "since": time.time()})

    @contextmanager
    def phase(self, name: str, then: str = RUNNING):
        """Mark a phase in which a dead engine makes verl wait for ever; the supervisor ends it after a limit."""
        self.enter(name)
        try:
            yield
        finally:
            self.enter(then)

    def finish(self, seconds: float) -> None:
        """Mark the run as finished after `seconds` of training."""
        self._write_state({"phase": "finished", "since": time.time(), "fit_seconds": seconds})

    def _write_state(self, state: dict) -> None:
        _write(self.directory / STATE_FILE, json.dumps(state))


def _write_lines(path: Path, rows: list[dict]) -> None:
    _write(path, "".join(json.dumps(row) + "\n" for row in rows))


def _write(path: Path, content: str) -> None:
    with replacing(path) as partial:
        partial.write_text(content)
