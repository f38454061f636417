"""What a run leaves on disk.

A run's directory has, beside verl's own logs:

rollouts/<step>.jsonl: one response per line as token ids, in dispatch order, kept or dropped; when it was generated.
val_rollouts/<step>.jsonl: the same of a validation, in the order of the data.
engine_steps/<step>.npz: sam.record.engine_steps.EngineSteps of the first replica.
metrics.jsonl: one object per training step, everything that goes to wandb; step 0 is the first validation.
state.json: the phase the run is in, for the supervisor.
config.yaml: its settings (recipe.sam_dapo.record.settings). versions.json: what it was started by and with.

Each appears whole or not at all, whenever a run is killed. metrics.jsonl grows by a row at a time: of one that was cut
the row before stays the last, and a run that goes on takes the rest away.
"""

import json
import time
from contextlib import contextmanager, suppress
from numbers import Real
from pathlib import Path
from typing import Any

from sam.reading import ReadError, json_object
from sam.record import replacing, responses
from sam.record.responses import METRICS_FILE, responses_path

VAL_ROLLOUTS = "val_rollouts"
STATE_FILE = "state.json"
LOCK_FILE = "running.json"  # locked while a run goes on
# Phases that state.json names, beside finished.
STARTING_RAY = "starting Ray"
STARTING_ENGINES = "starting the engines"
STARTING_LOOPS = "starting the agent loops"
VALIDATING = "validation"
RUNNING = "running"
ROLLOUT = "rollout"
LOG_PROBABILITIES = "log-probabilities"
UPDATE = "update"
SAVING = "checkpoint"
WEIGHT_SYNC = "weight_sync"  # which may hang


def read_json(path: Path) -> dict:
    """What a file holds; nothing where it is missing or written by halves."""
    with suppress(ReadError):
        return json_object(path)
    return {}


def read_metrics(run_directory: Path) -> dict[int, dict[str, float]]:
    """Training step to its figures, without rows that a full disk has left by halves; empty before the first one."""
    with suppress(ReadError):
        return responses.read_metrics(run_directory, left_out=[])
    return {}


class RunRecord:
    """Writes below a run's directory."""

    def __init__(self, directory: Path):
        self.directory = directory
        self._state: dict[str, Any] = {}
        for name in ("rollouts", VAL_ROLLOUTS, "engine_steps"):
            (directory / name).mkdir(parents=True, exist_ok=True)

    def start(self, first_step: int) -> None:
        """Drop the metrics that an interrupted run wrote from `first_step` on: those steps are repeated."""
        path = self.directory / METRICS_FILE
        if path.exists():
            kept = {step: row for step, row in read_metrics(self.directory).items() if step < first_step}
            _write_lines(path, [{"step": step, **row} for step, row in kept.items()])

    def append_metrics(self, step: int, metrics: dict) -> None:
        """Append the numbers among a step's metrics to metrics.jsonl."""
        row: dict[str, float] = {"step": step}
        for key, value in metrics.items():
            if isinstance(value, Real) and type(value) is not bool:
                row[key] = float(value)
        with open(self.directory / METRICS_FILE, "a") as file:
            file.write(json.dumps(row) + "\n")

    def write_rollouts(self, step: int, rows: list[dict]) -> None:
        """Write a step's responses to rollouts/<step>.jsonl."""
        _write_lines(responses_path(self.directory, step), rows)

    def write_validation(self, step: int, rows: list[dict]) -> None:
        """Write the responses of the validation after a step to val_rollouts/<step>.jsonl."""
        _write_lines(self.directory / VAL_ROLLOUTS / f"{step}.jsonl", rows)

    def enter(self, phase: str) -> None:
        """Say which phase begins, to the supervisor and to who looks at the screen."""
        self._state = {"phase": phase, "since": time.time()}
        self.show()

    def show(self, **figures: float) -> None:
        """Say how far the phase is."""
        _write_lines(self.directory / STATE_FILE, [self._state | {"at": time.time()} | figures])

    @contextmanager
    def weight_sync(self):
        """Mark a weight sync, in which a dead engine makes verl wait for ever; the supervisor ends it after a limit."""
        self.enter(WEIGHT_SYNC)
        try:
            yield
        finally:
            self.enter(RUNNING)


def _write_lines(path: Path, rows: list[dict]) -> None:
    with replacing(path) as partial:
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
