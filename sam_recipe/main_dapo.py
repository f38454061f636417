"""`python -m sam_recipe.main_dapo --config-name dapo_tiny_cpu [overrides]`: one DAPO run.

The config is composed and checked before anything heavy is imported. The run itself is a child process under
sam_recipe.launch.supervisor, which stops everything the run started, however it ends.
"""

import argparse
import os
import sys
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig

from sam_recipe import preflight
from sam_recipe.arguments import parse
from sam_recipe.launch import checkpoints, environment, supervisor
from sam_recipe.launch.config import ConfigError, compose_config
from sam_recipe.launch.ending import LOG_FILE, write_error, write_last_line
from sam_recipe.launch.progress import LogOnScreen, Progress
from sam_recipe.launch.versions import write_versions
from sam_recipe.record import STARTING_RAY, STATE_FILE, RunRecord, changes, keep, read_json


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if folder := os.environ.get(supervisor.VARIABLE):
        run(compose_config(options.config_name, options.overrides), Path(folder))
        return 0
    try:
        config = compose_config(options.config_name, options.overrides)
        preflight.check(config, files=not (options.check and "assets" in config))
        for warning in preflight.compatibility.warnings(config):
            print(f"warning: {warning}", file=sys.stderr)
        if options.check:
            return 0
        run_directory, steps = Path(config.run_dir), config.trainer.total_training_steps
        if is_finished(config):
            again = "to train again: another run_dir=, trainer.resume_mode=disable, or remove the directory"
            print(f"{run_directory} holds this run, finished after {steps} steps: nothing to do ({again})")
            return 0
        with supervisor.lock(run_directory):
            return supervisor.guard(run_directory, lambda: supervise(config, options))
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def is_finished(config: DictConfig) -> bool:
    """Whether the run that would be resumed has its last checkpoint and its end already."""
    directory, steps = Path(config.run_dir), config.trainer.total_training_steps
    if config.trainer.resume_mode != "auto" or steps is None:
        return False
    has_ended = read_json(directory / STATE_FILE).get("phase") == "finished"
    return has_ended and (checkpoints.resumes_after(directory) or 0) >= steps


def supervise(config: DictConfig, options: argparse.Namespace) -> int:
    """Run this module again as a child and see it through; again from the checkpoint before one that cannot be read."""
    run_directory, steps = Path(config.run_dir), config.trainer.total_training_steps
    words = ["--config-name", options.config_name, *options.overrides]
    command = [sys.executable, "-m", "sam_recipe.main_dapo", *words]
    limits = {"weight_sync": config.watchdog.weight_sync_seconds}
    while True:
        try:
            step, origin = go_on(config, options.accept_changes)
            write_versions(run_directory / "versions.json", ["sam", "run", *words])
            (log := run_directory / LOG_FILE).touch()
        except (ConfigError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
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


def go_on(config: DictConfig, accept_changes: bool) -> tuple[int, Path | None]:
    """Say after which step and from which folder a run goes on, with what other settings, and keep its config.

    Raises:
        ConfigError: no checkpoint can be read, or settings make another curve and were not accepted.
    """
    run_directory, curve, others = Path(config.run_dir), [], []
    try:
        step, folder, skipped = checkpoints.find(config)
    except ValueError as error:
        value, remedy = (*error.args, "put it back, or begin again with trainer.resume_mode=disable")[:2]
        said = f"{value}: no whole checkpoint to go on from: {remedy} [run_dir.checkpoint]"
        raise ConfigError(said) from error
    if own := folder is not None and folder.is_relative_to(Path(config.trainer.default_local_dir)):
        try:
            curve, others = changes(run_directory, config)
        except ValueError as error:
            curve = [str(error)]
    if curve and not accept_changes:
        said = f"run_dir={run_directory} goes on from step {step}, changed: {', '.join(curve)}"
        remedy = "set it as it was, choose another run_dir=, or add --accept-changes"
        raise ConfigError(f"{said}: it would be another curve: {remedy} [run_dir.changed]")
    keep(run_directory, config, step if folder else None)
    environment.name_wandb_run(run_directory, goes_on=own)
    for said in skipped:
        say(run_directory, f"warning: {said}")
    if folder:
        say(run_directory, f"resumed from step {step} of {run_directory if own else folder.parents[1]}")
    if changed := [*curve, *others]:
        say(run_directory, f"changed since then: {', '.join(changed)}")
    return step, folder


def say(run_directory: Path, line: str) -> None:
    """On the screen and in the log."""
    print(line, file=sys.stderr, flush=True)
    with open(run_directory / LOG_FILE, "a") as log:
        log.write(line + "\n")


def run(config: DictConfig, folder: Path) -> None:
    """The run itself, with its private folder. Ray is imported only here, after the environment is set."""
    supervisor.terminate_with_parent()
    RunRecord(Path(config.run_dir)).enter(STARTING_RAY)
    environment.prepare(config, folder)
    from sam_recipe.trainer import run_in_ray

    try:
        run_in_ray(config, environment.ray_runtime_env(config.trainer.device), str(folder / "ray"))
    except Exception as error:
        write_error(folder, error)
        raise


if __name__ == "__main__":
    sys.exit(main())
