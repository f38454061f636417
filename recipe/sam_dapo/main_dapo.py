"""`python -m recipe.sam_dapo.main_dapo --config-name dapo_tiny_cpu [overrides]`: one DAPO run, as a child process.

The config is composed and checked before anything heavy is imported.
"""

import argparse
import json
import os
import shlex
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig

from recipe.sam_dapo import preflight
from recipe.sam_dapo.arguments import parse
from recipe.sam_dapo.launch import environment, supervisor
from recipe.sam_dapo.launch.config import ConfigError, compose_config
from recipe.sam_dapo.launch.screen import (
    ERROR_FILE,
    LOG_FILE,
    TRACKER_FILE,
    Progress,
    checkpoint,
    newest,
    step_of,
    write_last_line,
)
from recipe.sam_dapo.launch.versions import known
from recipe.sam_dapo.record import STARTING_RAY, STATE_FILE, RunRecord, read_json
from recipe.sam_dapo.record.settings import changes, keep
from sam.record import replacing


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if folder := os.environ.get(supervisor.VARIABLE):
        config = compose_config(options.config_name, options.overrides)
        with supervisor.supervised(Path(config.run_dir)):
            run(config, Path(folder))
        return 0
    try:
        config = compose_config(options.config_name, options.overrides)
        preflight.check(config, files=not (options.check and "assets" in config))
        for warning in preflight.compatibility.warnings(config):
            print(f"warning: {warning}", file=sys.stderr)
        changed = changed_settings(config, options.accept_changes)
        if options.check:
            return 0
        run_directory = Path(config.run_dir)
        if is_over(config):
            steps = config.trainer.total_training_steps
            line = f"{run_directory} holds this run, finished after {steps} steps: nothing to do"
            if changed:
                line += f", with other settings than these: {', '.join(changed)}"
            again = "to train again: another run_dir=, trainer.resume_mode=disable, or remove the directory"
            print(f"{line} ({again})")
            return 0
        with supervisor.lock(run_directory):
            return supervise(config, options)
    except (ValueError, OSError) as error:
        lines = str(error).splitlines()
        print(*(f"error: {line}" for line in lines), sep="\n", file=sys.stderr)
        if len(lines) > 1:
            asks = f"sam doctor --config-name {options.config_name} also asks verl and vLLM"
            print(f"{preflight.counted(lines)}; {asks}", file=sys.stderr)
        return 2


def supervise(config: DictConfig, options: argparse.Namespace) -> int:
    """Run this module again as a child and see it through."""
    run_directory = Path(config.run_dir)
    sync_seconds = config.watchdog.weight_sync_seconds
    words = ["--config-name", options.config_name, *options.overrides]
    command = [sys.executable, "-m", "recipe.sam_dapo.main_dapo", *words]
    origin = go_on(config, options.accept_changes)
    made_by = {"command": shlex.join(["sam", "run", *words])} | known()
    with replacing(run_directory / "versions.json") as partial:
        partial.write_text(json.dumps(made_by, indent=2) + "\n")
    first = step_of(origin) if origin else 0
    progress = Progress(run_directory, config.trainer.total_training_steps, first)
    ending = supervisor.supervise(command, run_directory, sync_seconds, origin, progress.update)
    write_last_line(run_directory, ending)
    return ending.code


def is_over(config: DictConfig) -> bool:
    """Whether the checkpoint that a run would go on from is its last step's."""
    steps = config.trainer.total_training_steps
    folder = checkpoint(config)
    trains = bool(steps) and not config.trainer.val_only
    return trains and folder is not None and step_of(folder) >= steps


def changed_settings(config: DictConfig, accept_changes: bool) -> list[str]:
    """What differs from the settings of the run in run_dir that goes on or is over, as `key before -> now`.

    Raises:
        ValueError: no whole checkpoint, or settings make another curve and were not accepted, or are not known.
    """
    folder = checkpoint(config)
    if folder is None or not folder.is_relative_to(Path(config.trainer.default_local_dir)):
        return []
    curve, others = changes(Path(config.run_dir), config)
    if curve and not accept_changes:
        holds = "holds a run that finished after" if is_over(config) else "goes on from"
        problem = f"run_dir={config.run_dir} {holds} step {step_of(folder)}, changed: {', '.join(curve)}"
        remedy = "set it as it was, choose another run_dir=, or add --accept-changes"
        raise ConfigError(f"{problem}: it would be another curve: {remedy} [run_dir.changed]")
    return [*curve, *others]


def go_on(config: DictConfig, accept_changes: bool) -> Path | None:
    """Say from which folder a run goes on, with what other settings, and keep its config.

    Raises:
        ValueError: as `changed_settings`.
    """
    run_directory = Path(config.run_dir)
    folder = checkpoint(config)
    step = step_of(folder) if folder else None
    goes_on = folder is not None and folder.is_relative_to(Path(config.trainer.default_local_dir))
    if folder is None and read_json(run_directory / STATE_FILE).get("phase") == "finished":
        say(run_directory, f"{run_directory} held a finished run, which this one replaces")
        with suppress(ValueError):  # what that one's settings were is not known
            curve, others = changes(run_directory, config)
            say(run_directory, f"changed since then: {', '.join([*curve, *others]) or 'nothing'}")
    changed = changed_settings(config, accept_changes)
    keep(run_directory, config, step)
    RunRecord(run_directory).start(0 if step is None else step + 1)  # before the screen reads of steps to be repeated
    named = newest(config)
    if config.trainer.resume_mode == "auto" and named != folder:
        say(run_directory, f"warning: {named} is damaged: the checkpoint before it is taken")
        with replacing(named.with_name(TRACKER_FILE)) as partial:  # where verl looks
            partial.write_text(str(step))
    if folder:
        say(run_directory, f"resumed from step {step} of {run_directory if goes_on else folder.parents[1]}")
    if not goes_on:
        (run_directory / "wandb" / "wandb-resume.json").unlink(missing_ok=True)  # of the run before
    if changed:
        say(run_directory, f"changed since then: {', '.join(changed)}")
    return folder


def say(run_directory: Path, line: str) -> None:
    """On the screen and in the log."""
    print(line, file=sys.stderr, flush=True)
    with open(run_directory / LOG_FILE, "a") as log:
        log.write(line + "\n")


def run(config: DictConfig, folder: Path) -> None:
    """The run itself, with its private folder. Ray is imported only here, after the environment is set."""
    RunRecord(Path(config.run_dir)).enter(STARTING_RAY)
    environment.prepare(config, folder)
    from recipe.sam_dapo.trainer import run_in_ray

    try:
        run_in_ray(config, environment.ray_runtime_env(config), str(folder / "ray"))
    except Exception:  # Ray's or verl's, of any kind: its last line is the run's
        with suppress(OSError):  # a full disk
            (folder / ERROR_FILE).write_text(traceback.format_exc())
        raise


if __name__ == "__main__":
    sys.exit(main())
