"""`python -m recipe.main_dapo --config-name dapo_tiny_cpu [overrides]`: one DAPO run.

The config is composed and checked before anything heavy is imported. The run itself is a child process under
recipe.launch.supervisor, which stops everything the run started, however it ends.
"""

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig

from recipe import preflight
from recipe.arguments import parse
from recipe.launch import checkpoints, environment, processes, run_lock, supervisor
from recipe.launch.config import ConfigError, compose_config
from recipe.launch.ending import LOG_FILE, write_last_line
from recipe.launch.progress import LogOnScreen, Progress
from recipe.launch.scratch import VARIABLE, Scratch
from recipe.launch.versions import write_versions
from recipe.record.run_directory import STARTING_RAY, STATE_FILE, RunRecord, read_json
from recipe.record.settings import changes, keep


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if VARIABLE in os.environ:
        return run(compose_config(options.config_name, options.overrides), Scratch(Path(os.environ[VARIABLE])))
    try:
        config = compose_config(options.config_name, options.overrides)
        preflight.check(config, to_be_built=Path(config.assets) if options.check and "assets" in config else None)
        for warning in preflight.find_warnings(config):
            print(f"warning: {warning}", file=sys.stderr)
        if options.check:
            return 0
        run_directory, steps = Path(config.run_dir), config.trainer.total_training_steps
        if is_finished(config):
            print(
                f"{run_directory} holds this run, finished after {steps} steps: nothing to do (to train again: another "
                "run_dir=, trainer.resume_mode=disable, or remove the directory)"
            )
            return 0
        with run_lock.lock(run_directory):
            return supervisor.guard(run_directory, lambda: supervise(config, options))
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def is_finished(config: DictConfig) -> bool:
    """Whether the run that would be resumed has its last checkpoint and its end already."""
    directory = Path(config.run_dir)
    steps = config.trainer.total_training_steps
    if config.trainer.resume_mode != "auto" or steps is None:
        return False
    phase = read_json(directory / STATE_FILE).get("phase")
    return phase == "finished" and (checkpoints.last_complete(directory) or 0) >= steps


def supervise(config: DictConfig, options: argparse.Namespace) -> int:
    """Run this module again as a child and see it through; again from the checkpoint before one that cannot be read."""
    run_directory, steps = Path(config.run_dir), config.trainer.total_training_steps
    command = [sys.executable, "-m", "recipe.main_dapo", "--config-name", options.config_name, *options.overrides]
    limits = {"weight_sync": config.watchdog.weight_sync_seconds}
    while True:
        try:
            resumed = go_on(config, options.accept_changes)
            write_versions(run_directory / "versions.json")
            (log := run_directory / LOG_FILE).touch()
        except (ConfigError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        step, origin = (resumed.step, resumed.folder) if resumed else (0, None)
        screen = LogOnScreen(log) if options.verbose else Progress(run_directory, steps, step)
        try:
            ending = supervisor.supervise(command, run_directory, limits, origin, screen.update)
        finally:
            with suppress(OSError):  # a terminal that was closed
                screen.close()
        is_auto = config.trainer.resume_mode == "auto"
        if not (is_auto and ending.unreadable and checkpoints.give_up(ending.unreadable)):
            write_last_line(run_directory, ending)
            return ending.code
        say(run_directory, f"warning: {ending.reason}: going on from the one before")


def go_on(config: DictConfig, accept_changes: bool) -> checkpoints.Resumed | None:
    """Say where a run goes on and with what other settings, and keep the config; None of a new run.

    Raises:
        ConfigError: no checkpoint can be read, or settings make another curve and were not accepted.
    """
    run_directory = Path(config.run_dir)
    try:
        resumed = checkpoints.find(config)
    except ValueError as error:
        value, remedy = (*error.args, "put it back, or begin again with trainer.resume_mode=disable")[:2]
        said = f"{value}: no whole checkpoint to go on from: {remedy} [run_dir.checkpoint]"
        raise ConfigError(said) from error
    curve, others = [], []
    own = resumed is not None and resumed.folder.is_relative_to(Path(config.trainer.default_local_dir))
    if own:
        try:
            curve, others = changes(run_directory, config)
        except ValueError as error:
            curve = [str(error)]
    if curve and not accept_changes:
        said = f"run_dir={run_directory} goes on from step {resumed.step}, changed: {', '.join(curve)}"
        remedy = "set it as it was, choose another run_dir=, or add --accept-changes"
        raise ConfigError(f"{said}: it would be another curve: {remedy} [run_dir.changed]")
    keep(run_directory, config, resumed.step if resumed else None)
    environment.name_wandb_run(run_directory, goes_on=own)
    if resumed:
        for said in resumed.skipped:
            say(run_directory, f"warning: {said}")
        say(run_directory, f"resumed from step {resumed.step} of {run_directory if own else resumed.folder.parents[1]}")
    if changed := [*curve, *others]:
        say(run_directory, f"changed since then: {', '.join(changed)}")
    return resumed


def say(run_directory: Path, line: str) -> None:
    """On the screen and in the log."""
    print(line, file=sys.stderr, flush=True)
    with open(run_directory / LOG_FILE, "a") as log:
        log.write(line + "\n")


def run(config: DictConfig, scratch: Scratch) -> int:
    """The run itself. Ray is imported only here, after the environment is set."""
    processes.terminate_with_parent()
    RunRecord(Path(config.run_dir)).enter(STARTING_RAY)
    environment.prepare(config, scratch.directory)
    from recipe.trainer.task_runner import run_in_ray

    try:
        run_in_ray(config, environment.ray_runtime_env(), str(scratch.directory / "ray"))
    except Exception as error:
        scratch.write_error(error)
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main())
