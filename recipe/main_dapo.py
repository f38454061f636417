"""`python -m recipe.main_dapo --config-name dapo_tiny_cpu [overrides]`: one DAPO run.

The config is composed and checked before anything heavy is imported. The run itself is a child process under
recipe.launch.supervisor, which stops everything the run started, however it ends.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from recipe.launch import environment, supervisor
from recipe.launch.config import ConfigError, compose_config
from recipe.launch.progress import Progress
from recipe.launch.versions import write_versions
from recipe.preflight import checks, ray_head
from recipe.record.run_directory import STATE_FILE

CHILD = "RECIPE_RUN_SCRATCH"  # set by the supervisor for the process that does the run


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipe.main_dapo", description=__doc__.splitlines()[0])
    parser.add_argument("--config-name", required=True, help="a file of configs/ without .yaml")
    parser.add_argument("--log", type=Path, help="file for verl's and vLLM's output; a progress bar is shown instead")
    parser.add_argument("--check", action="store_true", help="check config and machine only, before assets are built")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, for example speculation=off")
    options = parser.parse_args(arguments)
    try:
        config = compose_config(options.config_name, options.overrides)
        if CHILD not in os.environ:
            checks.check(config, to_be_built=Path(config.assets) if options.check and "assets" in config else None)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if CHILD not in os.environ:
        for warning in checks.find_warnings(config):
            print(f"warning: {warning}", file=sys.stderr)
    if options.check:
        return 0
    if CHILD in os.environ:
        return run(config, Path(os.environ[CHILD]))
    if is_finished(config):
        print(
            f"{config.run_dir} holds this run, finished after {config.trainer.total_training_steps} steps: nothing to "
            "do (to train again: another run_dir=, trainer.resume_mode=disable, or remove the directory)"
        )
        return 0
    try:
        with ray_head.lock(Path(config.run_dir)):
            return supervise(config, options)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def is_finished(config: DictConfig) -> bool:
    """Whether the run that would be resumed has its last checkpoint and its end already."""
    directory = Path(config.run_dir)
    steps = config.trainer.total_training_steps
    if config.trainer.resume_mode != "auto" or steps is None:
        return False
    try:
        checkpoint = int((directory / "checkpoints" / "latest_checkpointed_iteration.txt").read_text())
        phase = json.loads((directory / STATE_FILE).read_text())["phase"]
    except (OSError, ValueError, KeyError):
        return False
    return phase == "finished" and checkpoint >= steps


def supervise(config: DictConfig, options: argparse.Namespace) -> int:
    """Run this module again as a child and see it through."""
    run_directory = Path(config.run_dir)
    run_directory.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, run_directory / "config.yaml", resolve=True)
    write_versions(run_directory / "versions.json")
    command = [
        sys.executable,
        "-m",
        "recipe.main_dapo",
        "--config-name",
        options.config_name,
        *options.overrides,
    ]
    progress = Progress(run_directory, config.trainer.total_training_steps) if options.log else None
    code = supervisor.supervise(
        command,
        run_directory=run_directory,
        scratch_variable=CHILD,
        phase_limits={"weight_sync": float(config.watchdog.weight_sync_seconds)},
        log=options.log,
        on_poll=progress.update if progress else lambda: None,
    )
    if progress:
        progress.close()
    if code and options.log:
        print(f"the run ended with code {code}; the end of {options.log}:", file=sys.stderr)
        print("\n".join(options.log.read_text(errors="replace").splitlines()[-30:]), file=sys.stderr)
    return code


def run(config: DictConfig, scratch: Path) -> int:
    """The run itself. Ray is imported only here, after the environment is set."""
    environment.prepare(config, scratch)
    from recipe.trainer.task_runner import run_in_ray

    run_in_ray(config, environment.ray_runtime_env(), str(scratch / "ray"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
