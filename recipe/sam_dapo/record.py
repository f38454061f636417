"""What runs and builds leave on disk, and the metrics of a rollout.

A run's directory has, beside verl's own logs, and each appearing whole or not at all:

rollouts/<step>.jsonl: one response per line as token ids, in dispatch order, kept or dropped; when it was generated.
val_rollouts/<step>.jsonl: the same of a validation, in the order of the data.
engine_steps/<step>.npz: sam.record.engine_steps.EngineSteps of the first replica.
metrics.jsonl: one object per training step, everything that goes to wandb; step 0 is the first validation.
state.json: the phase the run is in, for the supervisor. config.yaml: its settings.
"""

import fcntl
import hashlib
import json
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from importlib.metadata import version
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from sam.command import Parser, run_command
from sam.reading import ReadError, json_object
from sam.record import replacing, responses
from sam.record.engine_steps import EngineSteps
from sam.record.responses import CONFIG_FILE, METRICS_FILE, responses_path

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
        numbers = {key: value for key, value in metrics.items() if isinstance(value, Real) and type(value) is not bool}
        values = {key: float(value) for key, value in numbers.items()}
        with open(self.directory / METRICS_FILE, "a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

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


# Where a run lies, how fast it is, how often it saves and what it shows: not what is learnt, but for the order in which
# numbers are added.
HARMLESS = """
    run_dir assets assets_command drafters machine watchdog routing speculation ray_kwargs transfer_queue
    trainer.experiment_name trainer.logger trainer.save_freq trainer.test_freq trainer.val_before_train
    trainer.resume_mode trainer.resume_from_path trainer.default_local_dir trainer.max_actor_ckpt_to_keep
    trainer.total_epochs trainer.total_training_steps trainer.val_only data.val_files ROLLOUT.gpu_memory_utilization
    ROLLOUT.max_num_seqs ROLLOUT.max_num_batched_tokens ROLLOUT.enforce_eager ROLLOUT.router_config_path
    ROLLOUT.engine_kwargs.vllm ROLLOUT.trace ROLLOUT.profiler ROLLOUT.prometheus global_profiler trainer.project_name
    ROLLOUT.log_prob_micro_batch_size_per_gpu actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
    actor_rollout_ref.actor.profiler actor_rollout_ref.actor.ppo_max_token_len_per_gpu
""".replace("ROLLOUT", "actor_rollout_ref.rollout").split()
NOT_HARMLESS = "speculation.verification"  # other tokens, of the same distribution


def changes(run_directory: Path, config: DictConfig) -> tuple[list[str], list[str]]:
    """Settings that differ from those the directory holds, as `key before -> now`: that make another curve, and others.
    ValueError if the file cannot be read."""
    path = run_directory / CONFIG_FILE
    try:
        found = differences(OmegaConf.to_container(OmegaConf.load(path)), OmegaConf.to_container(config))
    except Exception as error:  # YAML's and OmegaConf's, which share no class
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} cannot be read ({reason}): what settings the run had is not known") from error
    curve, others = [], []
    for key, (old, new) in found.items():
        harmless = key != NOT_HARMLESS and any(f"{key}.".startswith(f"{one}.") for one in HARMLESS)
        (others if harmless else curve).append(f"{key} {old} -> {new}")
    return curve, others


def differences(before: dict, now: dict) -> dict[str, tuple[str, str]]:
    """Dotted keys whose values differ, with both values as texts.

    Example:
        >>> differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": None}, "d": 4})
        {'a.c': ('2', 'null'), 'd': ('not set', '4')}
    """
    before, now = _flat(before), _flat(now)
    pairs = {key: (before.get(key, "not set"), now.get(key, "not set")) for key in sorted(before.keys() | now.keys())}
    shown = {key: ["null" if value is None else str(value) for value in pair] for key, pair in pairs.items()}
    return {key: (old, new) for key, (old, new) in shown.items() if pairs[key][0] != pairs[key][1]}


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = _with_todays_name(value)
    return flat


def _with_todays_name(value: Any) -> Any:
    """A setting with this package's name of today: up to 0.2.0 it was `sam_recipe`, which run directories name."""
    return value.replace("sam_recipe.", "recipe.sam_dapo.") if isinstance(value, str) else value


def keep(run_directory: Path, config: DictConfig, until_step: int | None) -> None:
    """Write a config into the directory; the first that a run had until a step stays beside it where they differ."""
    path, made = run_directory / CONFIG_FILE, OmegaConf.to_yaml(config, resolve=True)
    kept = run_directory / f"config.until_step_{until_step}.yaml"
    if until_step is not None and path.exists() and path.read_text() != made and not kept.exists():
        path.rename(kept)
    path.write_text(made)


# Totals of the drafter that nobody acts on: engine_steps/<step>.npz has them.
ON_DISK_ONLY = {
    *("tracked_requests", "waited_steps", "late_steps", "exploring_steps", "path_tokens"),
    *("history_appended_tokens", "history_written_responses", "sharing_sent_tokens"),
    *(f"draft_model_{name}" for name in ("passes", "requests", "read_tokens")),
}


def rollout_metrics(replicas: list[EngineSteps], seconds: list[float], tail_threshold: int) -> dict[str, float]:
    """The metrics of a training step's rollout. Milliseconds are per engine step, shares are of engine steps.

    Args:
        seconds: wall time with at least one request in the engine, of every replica.
        tail_threshold: running requests at or below which a replica is in its tail.
    """

    def total(name: str) -> float:
        return float(sum(np.sum(getattr(part, name)) for part in replicas))

    steps = max(1.0, float(sum(map(len, replicas))))
    milliseconds = {name: total(f"{name}_ms") / steps for name in ("step", "forward", "verify", "draft")}
    tail_ms = sum(float(part.step_ms[part.in_tail(tail_threshold)].sum()) for part in replicas)
    drafted, accepted, verified = map(total, ("drafted", "accepted", "turn_steps"))
    values = {
        "rollout/seconds": max(seconds),
        "rollout/engine_steps": steps,
        "rollout/tokens": total("emitted"),
        "rollout/preemptions": total("preemptions"),
        "rollout/tail_seconds": tail_ms / len(replicas) / 1e3,  # mean of the replicas
        "rollout/tail_share": tail_ms / total("step_ms") if total("step_ms") else 0.0,
        "rollout/switch_on_share": total("drafting") / steps,
        "rollout/asynchronous_scheduling": float(all(part.asynchronous for part in replicas)),
        "rollout/spec_drafted_tokens": drafted,
        "rollout/spec_accepted_tokens": accepted,
        "rollout/spec_accept_rate": accepted / drafted if drafted else 0.0,
        "rollout/spec_accept_length": total("turn_emitted") / verified if verified else 1.0,
        "rollout/spec_verify_steps": verified,
        **{f"rollout/{name}_ms_per_step": value for name, value in milliseconds.items()},
        "rollout/other_ms_per_step": max(0.0, 2 * milliseconds["step"] - sum(milliseconds.values())),
    }
    drafted_at, accepted_at = (sum(getattr(part, name) for part in replicas) for name in ("drafted_at", "accepted_at"))
    for position in np.flatnonzero(drafted_at):
        rate = float(accepted_at[position] / drafted_at[position])
        values[f"rollout/spec_accept_rate/position_{position + 1}"] = rate
    for turn, length in EngineSteps.turn_lengths(replicas).items():
        values[f"rollout/spec_accept_length/turn_{turn}"] = length
    replays = [part.replays() for part in replicas]
    for phase in replays[0] if None not in replays else ():  # no value without graphs, or without steps
        replayed, of = np.sum([one[phase] for one in replays], axis=0)
        values |= {f"rollout/graph_share/{phase}": float(replayed / of)} if of else {}
    counters = {name: count for name, count in replicas[0].counters.items() if name not in ON_DISK_ONLY}
    return values | {f"rollout/drafter/{name}": float(count) for name, count in counters.items()}


BUILD_RECORD = "assets.json"


def build_once(output: Path, name: str, settings: dict, made_of: tuple, build: Callable[[Path], None]) -> bool:
    """Have `build` fill `output`, unless it did so before with all of this the same; says whether it did.

    The folder is filled beside `output` and moved into place when complete; of several processes one builds, the others
    wait for it.

    Args:
        name: of the folder's content, in messages.
        settings: everything the user may set; kept in the folder's assets.json.
        made_of: files of code, and names of packages, that decide what is built.

    Raises:
        ValueError: `output` holds something else.
    """
    parts = [one.read_text() if isinstance(one, Path) else version(one) for one in made_of]
    digest = hashlib.sha256(json.dumps([settings, parts], sort_keys=True).encode()).hexdigest()
    record = output / BUILD_RECORD
    output.parent.mkdir(parents=True, exist_ok=True)
    with (output.parent / f".{output.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if read_json(record).get("digest") == digest:
            return False
        if output.exists() and not record.is_file() and (not output.is_dir() or any(output.iterdir())):
            raise ValueError(
                f"output is {output}, which holds something else than {name} (no {BUILD_RECORD}): "
                "name a new folder, or remove this one"
            )
        with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as scratch:
            (built := Path(scratch) / "built").mkdir()
            build(built)
            (built / BUILD_RECORD).write_text(json.dumps({"digest": digest, "settings": settings}, indent=2) + "\n")
            if output.exists():
                output.rename(Path(scratch) / "replaced")
            built.rename(output)
    return True


def build_command(parser: Parser, arguments: list[str] | None, name: str, prepare: Callable[[Path, int], bool]) -> int:
    """The command that builds the assets called `name`; `prepare(folder, seed)` says whether it built them."""
    parser.add_argument("--output", type=Path, required=True, help="folder to put them in")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default 0)")
    options = parser.parse_args(arguments)
    output = options.output.absolute()
    if options.seed < 0:
        parser.error(f"--seed {options.seed}: expected a number from 0 up")
    return run_command(lambda: f"{name} {'built' if prepare(output, options.seed) else 'found'} in {output}")
