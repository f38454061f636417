"""`python -m recipe.main_dapo --config-name dapo_tiny_cpu [overrides]`: one DAPO run.

The config is composed and checked before anything heavy is imported. The run itself is a child process under
recipe.launch.supervisor, which stops everything the run started, however it ends.
"""

import argparse
import os
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from recipe.launch import checkpoints, environment, processes, run_lock, supervisor
from recipe.launch.config import ConfigError, compose_config
from recipe.launch.ending import LOG_FILE, write_last_line
from recipe.launch.progress import LogOnScreen, Progress
from recipe.launch.scratch import VARIABLE, Scratch
from recipe.launch.versions import write_versions
from recipe.preflight import checks
from recipe.record.run_directory import STATE_FILE, read_json


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m recipe.main_dapo",
        description=__doc__.splitlines()[0],
        epilog="The screen shows a line of progress and, at the end, how the run ended. All output of verl, vLLM and "
        "Ray is appended to train.log in run_dir.",
    )
    parser.add_argument("--config-name", required=True, help="a file of configs/ without .yaml")
    parser.add_argument("--verbose", action="store_true", help="show train.log on the screen, in place of the progress")
    parser.add_argument("--check", action="store_true", help="check config and machine only, before assets are built")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, for example speculation=off")
    parser.add_argument("--log", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args(arguments)  # --verbose among overrides too
    if options.log:
        print("warning: --log is ignored and will be removed: the log is train.log in run_dir", file=sys.stderr)
    if VARIABLE in os.environ:
        return run(compose_config(options.config_name, options.overrides), Scratch(Path(os.environ[VARIABLE])))
    try:
        config = compose_config(options.config_name, options.overrides)
        checks.check(config, to_be_built=Path(config.assets) if options.check and "assets" in config else None)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for warning in checks.find_warnings(config):
        print(f"warning: {warning}", file=sys.stderr)
    if options.check:
        return 0
    if is_finished(config):
        print(
            f"{config.run_dir} holds this run, finished after {config.trainer.total_training_steps} steps: nothing to "
            "do (to train again: another run_dir=, trainer.resume_mode=disable, or remove the directory)"
        )
        return 0
    try:
        with run_lock.lock(Path(config.run_dir)):
            return supervise(config, options)
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
    """Run this module again as a child and see it through."""
    run_directory = Path(config.run_dir)
    run_directory.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, run_directory / "config.yaml", resolve=True)
    write_versions(run_directory / "versions.json")
    checkpoints.repair_tracker(run_directory)
    command = [sys.executable, "-m", "recipe.main_dapo", "--config-name", options.config_name, *options.overrides]
    log, steps = run_directory / LOG_FILE, config.trainer.total_training_steps
    log.touch()
    screen = LogOnScreen(log) if options.verbose else Progress(run_directory, steps)
    phase_limits = {"weight_sync": config.watchdog.weight_sync_seconds}
    try:
        ending = supervisor.supervise(command, run_directory, phase_limits, on_poll=screen.update)
    finally:
        screen.close()
    write_last_line(run_directory, ending)
    return ending.code


def run(config: DictConfig, scratch: Scratch) -> int:
    """The run itself. Ray is imported only here, after the environment is set."""
    processes.terminate_with_parent()
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
