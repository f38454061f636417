"""What runs and builds leave on disk, and the metrics of a rollout.

A run's directory has, beside verl's own logs, and each appearing whole or not at all:

rollouts/<step>.jsonl: one response per line as token ids, in dispatch order, kept or dropped.
engine_steps/<step>.npz: sam.record.engine_steps.EngineSteps of the first replica.
metrics.jsonl: one object per training step, everything that goes to wandb; step 0 is the first validation.
state.json: the phase the run is in, for the supervisor. config.yaml: its settings.
"""

import fcntl
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig, OmegaConf

from sam.command import Parser, run_command
from sam.reading import ReadError, json_object
from sam.record import replacing, responses
from sam.record.engine_steps import DRAFT_MODEL_TOKENS, EngineSteps
from sam.record.responses import CONFIG_FILE, METRICS_FILE, responses_path

STATE_FILE = "state.json"
LOCK_FILE = "running.json"  # locked while a run goes on
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
        return responses.read_metrics(run_directory, left_out=[])
    return {}


class RunRecord:
    """Writes below a run's directory."""

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

    def write_rollouts(self, step: int, rows: list[dict]) -> None:
        """Write a step's responses to rollouts/<step>.jsonl."""
        _write_lines(responses_path(self.directory, step), rows)

    def enter(self, phase: str) -> None:
        """Say which phase begins, to the supervisor and to who looks at the screen."""
        _write_lines(self.directory / STATE_FILE, [{"phase": phase, "since": time.time()}])

    @contextmanager
    def phase(self, name: str, then: str = RUNNING):
        """Mark a phase in which a dead engine makes verl wait for ever; the supervisor ends it after a limit."""
        self.enter(name)
        try:
            yield
        finally:
            self.enter(then)


def _write_lines(path: Path, rows: list[dict]) -> None:
    with replacing(path) as partial:
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows))


# Where a run lies, how fast it is, how often it saves and what it shows: none of it changes what is learnt, but for the
# order in which numbers are added.
HARMLESS = """
    run_dir assets assets_command drafters machine watchdog routing speculation ray_kwargs transfer_queue
    global_profiler trainer.project_name trainer.experiment_name trainer.logger trainer.log_val_generations
    trainer.rollout_data_dir trainer.validation_data_dir trainer.save_freq trainer.test_freq trainer.val_before_train
    trainer.val_only trainer.resume_mode trainer.resume_from_path trainer.default_local_dir trainer.default_hdfs_dir
    trainer.max_actor_ckpt_to_keep trainer.max_critic_ckpt_to_keep trainer.total_epochs trainer.total_training_steps
    data.val_files data.val_batch_size data.val_max_samples data.dataloader_num_workers
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    ROLLOUT.gpu_memory_utilization ROLLOUT.max_num_seqs ROLLOUT.max_num_batched_tokens ROLLOUT.enforce_eager
    ROLLOUT.free_cache_engine ROLLOUT.enable_sleep_mode ROLLOUT.val_kwargs ROLLOUT.agent.num_workers
    ROLLOUT.router_config_path ROLLOUT.checkpoint_engine ROLLOUT.disable_log_stats ROLLOUT.enable_prefix_caching
    ROLLOUT.log_prob_micro_batch_size_per_gpu ROLLOUT.log_prob_max_token_len_per_gpu
    ROLLOUT.trace ROLLOUT.profiler ROLLOUT.prometheus actor_rollout_ref.actor.profiler
    ROLLOUT.engine_kwargs.vllm.additional_config ROLLOUT.engine_kwargs.vllm.speculative_config
    ROLLOUT.engine_kwargs.vllm.async_scheduling
""".replace("ROLLOUT", "actor_rollout_ref.rollout").split()
NOT_HARMLESS = ("speculation.verification",)  # other tokens, of the same distribution
SCHEDULES = ("lr_scheduler_type", "lr_decay_style")
LENGTHS = ("trainer.total_epochs", "trainer.total_training_steps")


def changes(run_directory: Path, config: DictConfig) -> tuple[list[str], list[str]]:
    """Settings that differ from those the directory holds, as `key before -> now`: that make another curve, and others.
    ValueError if the file cannot be read."""
    path = run_directory / CONFIG_FILE
    try:
        found = differences(OmegaConf.to_container(OmegaConf.load(path)), OmegaConf.to_container(config))
    except Exception as error:  # YAML's and OmegaConf's, which share no class
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} cannot be read ({reason}): what settings the run had is not known") from error
    optimizer = config.actor_rollout_ref.actor.optim
    is_constant = all(optimizer.get(name) in (None, "constant") for name in SCHEDULES)
    curve, others = [], []
    for key, (old, new) in found.items():
        harmless = _below(key, HARMLESS) and not _below(key, NOT_HARMLESS) and (is_constant or key not in LENGTHS)
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
    return {key: (_shown(old), _shown(new)) for key, (old, new) in pairs.items() if old != new}


def keep(run_directory: Path, config: DictConfig, until_step: int | None) -> None:
    """Write a config into the directory; the one that a run had until a step stays beside it where they differ."""
    path, made = run_directory / CONFIG_FILE, OmegaConf.to_yaml(config, resolve=True)
    if until_step is not None and path.exists() and path.read_text() != made:
        kept, number = run_directory / f"config.until_step_{until_step}.yaml", 1
        while kept.exists():
            number += 1
            kept = run_directory / f"config.until_step_{until_step}.{number}.yaml"
        path.rename(kept)
    path.write_text(made)


def _below(key: str, sections: Iterable[str]) -> bool:
    return any(f"{key}.".startswith(f"{section}.") for section in sections)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return found


def _shown(value: Any) -> str:
    return "null" if value is None else str(value)


# Totals of the drafter that nobody acts on: engine_steps/<step>.npz has them.
ON_DISK_ONLY = {
    *("tracked_requests", "waited_steps", "late_steps", "awaited_steps", "exploring_steps", "path_tokens"),
    *("history_appended_tokens", "history_written_responses", "sharing_sent_tokens"),
    *(f"draft_model_{name}" for name in ("passes", "read_tokens")),
    *DRAFT_MODEL_TOKENS,
}


def rollout_metrics(
    replicas: list[EngineSteps], seconds: list[float], tail_threshold: int, rounds: int
) -> dict[str, float]:
    """The metrics of a training step's rollout. Milliseconds are per engine step, shares are of engine steps.

    Args:
        seconds: wall time with at least one request in the engine, of every replica.
        tail_threshold: running requests at or below which a replica is in its tail.
        rounds: of generation.
    """

    def total(name: str) -> float:
        return float(sum(np.sum(getattr(part, name)) for part in replicas))

    steps = max(1.0, float(sum(map(len, replicas))))
    milliseconds = {name: total(f"{name}_ms") / steps for name in ("step", "forward", "verify", "draft")}
    tail_ms = sum(float(part.step_ms[part.in_tail(tail_threshold)].sum()) for part in replicas)
    drafted, accepted, verified = map(total, ("drafted", "accepted", "position_steps"))
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
        "rollout/spec_accept_length": total("position_emitted") / verified if verified else 1.0,
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
    if tokens := total("draft_model_drafted_tokens"):
        values["rollout/spec_draft_model_tokens"] = tokens
        values["rollout/spec_draft_model_accept_rate"] = total("draft_model_accepted_tokens") / tokens
    counters = {name: count for name, count in replicas[0].counters.items() if name not in ON_DISK_ONLY}
    values |= {f"rollout/drafter/{name}": float(count) for name, count in counters.items()}
    return values | _graph_shares(replicas) | _round_seconds(replicas, seconds, rounds)


def _graph_shares(replicas: list[EngineSteps]) -> dict[str, float]:
    """By phase, the share of steps that replayed a graph: no value without graphs, or without steps."""
    replays = [part.replays() for part in replicas]
    if None in replays:
        return {}
    sums = {phase: np.sum([one[phase] for one in replays], axis=0) for phase in replays[0]}
    return {f"rollout/graph_share/{phase}": float(found / steps) for phase, (found, steps) in sums.items() if steps}


def _round_seconds(replicas: list[EngineSteps], seconds: list[float], rounds: int) -> dict[str, float]:
    """Each round's seconds in the slowest replica, and a replica's mean in a round as cann-recipes-train has it."""
    parts = [found for part in replicas if (found := part.round_seconds(rounds)) is not None]
    slowest = np.max(parts, axis=0).tolist() if parts else []
    values = {f"rollout/round_seconds/{number}": value for number, value in enumerate(slowest, start=1)}
    return {**values, "rollout/round_seconds/replica_mean": sum(seconds) / len(seconds) / rounds}


BUILD_RECORD = "assets.json"


@dataclass(frozen=True)
class Contents:
    """What a folder is built from."""

    name: str  # of the folder's content, in messages
    settings: dict  # everything the user may set; kept in the folder's assets.json
    sources: Iterable[Path]  # files of code that decide what is built
    packages: Iterable[str]  # distributions whose versions decide what is built

    def digest(self) -> str:
        """A hash of settings, sources and versions."""
        record = {
            "settings": self.settings,
            "sources": [hashlib.sha256(path.read_bytes()).hexdigest() for path in self.sources],
            "versions": [version(package) for package in self.packages],
        }
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def build_once(output: Path, contents: Contents, build: Callable[[Path], None]) -> bool:
    """Have `build` fill `output`, unless what `contents` describes is there already; says whether it did.

    The folder is filled beside `output` and moved into place when complete; of several processes one builds, the others
    wait for it. ValueError if `output` holds something else.
    """
    digest, record = contents.digest(), output / BUILD_RECORD
    if read_json(record).get("digest") == digest:
        return False
    output.parent.mkdir(parents=True, exist_ok=True)
    with (output.parent / f".{output.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process is building the {contents.name}: waiting for it", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        if read_json(record).get("digest") == digest:
            return False
        if output.exists() and not record.is_file() and (not output.is_dir() or any(output.iterdir())):
            raise ValueError(
                f"output is {output}, which holds something else than {contents.name} (no {BUILD_RECORD}): "
                "name a new folder, or remove this one"
            )
        with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as scratch:
            built = Path(scratch) / "built"
            built.mkdir()
            build(built)
            made = {"digest": digest, "settings": contents.settings}
            (built / BUILD_RECORD).write_text(json.dumps(made, indent=2) + "\n")
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
