"""`python -m recipe.preflight --config-name X [--dry-run] [overrides]`: a table, red lines with their mend."""

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from recipe.launch import routing, sharing
from recipe.launch.config import ConfigError, compose_config
from recipe.preflight import checks, cluster, device_memory, machine, vllm_command
from recipe.preflight.problem import Problem

DEVICE_FILES = {"npu": "davinci[0-9]*", "cuda": "nvidia[0-9]*"}


def has_device(device: str) -> bool:
    return device not in DEVICE_FILES or any(Path("/dev").glob(DEVICE_FILES[device]))


def problems_by_check(config: DictConfig) -> dict[str, list[Problem] | None]:
    """Of every check; None of one that is skipped. Imports verl and vLLM, which takes half a minute."""
    skipped = [] if has_device(config.trainer.device) else checks.select(config, "device")
    return {check.name: None if check in skipped else list(check.find(config)) for check in checks.select(config)}


def describe(config: DictConfig) -> Iterator[str]:
    """Lines about a run that is still to start: warnings, what it consists of, the memory that it takes."""
    yield from (f"warning: {warning}" for warning in checks.find_warnings(config))
    rollout, trainer, speculation = config.actor_rollout_ref.rollout, config.trainer, config.speculation
    ranks = rollout.data_parallel_size
    replica = rollout.tensor_model_parallel_size * ranks
    count = device_memory.device_count(config) // replica
    each = "each" if ranks == 1 else f"on each of {ranks} data-parallel ranks"
    yield (
        f"{trainer.nnodes} nodes x {trainer.n_gpus_per_node} {trainer.device} devices; rollout: {count} "
        f"replica{'s' * (count != 1)} of {replica}, up to {rollout.max_num_seqs} requests {each}; training: "
        f"{config.actor_rollout_ref.actor.strategy}"
    )
    drafts = f", up to {speculation.num_speculative_tokens} draft tokens" * (speculation.method != "off")
    yield f"routing: {routing.describe(config)}"
    yield f"speculation: {speculation.method}{drafts}, {speculation.verification} verification"
    yield f"sharing: {sharing.describe(config)}"
    parts = machine.described(machine.memory_parts(config))
    yield f"a node's memory, GiB at most: {parts or 'nothing that is known beforehand'}"
    estimate = device_memory.describe(config)
    yield estimate or "no estimate of a device's memory: no accelerator, or no config.json of the model"


def commands(config: DictConfig, overrides: list[str]) -> Iterator[str]:
    from verl.workers.rollout.vllm_rollout.utils import build_cli_args_from_config

    yield shlex.join(["python", "-m", "recipe.main_dapo", "--config-name", config.config_name, *overrides])
    arguments = build_cli_args_from_config(vllm_command.server_arguments(config))
    yield shlex.join(["vllm", "serve", config.actor_rollout_ref.model.path, *arguments])


def print_table(found: dict[str, list[Problem] | None]) -> None:
    green, red, end = ("\033[32m", "\033[31m", "\033[0m") if sys.stdout.isatty() else ("", "", "")
    for name, problems in found.items():
        if problems is None:
            print(f"skip  {name}: no device of this config in this machine")
            continue
        print(f"{red}red  {end} {name}" if problems else f"{green}green{end} {name}")
        for problem in problems:
            print(f"        {problem}")


def main(arguments: list[str] | None = None) -> int:
    """0: nothing is wrong. 2: something is, or the config cannot be composed."""
    parser = argparse.ArgumentParser(prog="sam doctor", description=__doc__)
    parser.add_argument("--config-name", help="a file of configs/ without .yaml")
    parser.add_argument("--dry-run", action="store_true", help="also print the commands that would run")
    parser.add_argument("--npu-selftest", action="store_true", help="parity, precision and timing on the device itself")
    parser.add_argument("--output", type=Path, default=Path("outputs/npu_selftest"), help="folder for its report")
    parser.add_argument("--device", default="npu", help="device of its timings")
    parser.add_argument("--no-compile", action="store_true", help="its graphs without torch.compile")
    parser.add_argument("--dtype", default="bfloat16", help="of its model")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, for example speculation=off")
    options = parser.parse_intermixed_args(arguments)
    if options.npu_selftest:
        from recipe.preflight.npu_selftest import markdown, selftest

        selftested = selftest(options.output, options.device, compiled=not options.no_compile, dtype=options.dtype)
        print(markdown(selftested))
        return int(any("error" in row for row in selftested["engines"].values()))
    if options.config_name is None:
        parser.error("give --config-name or --npu-selftest")
    try:
        config = compose_config(options.config_name, options.overrides)
        checks.check_keys(config)
    except ConfigError as error:
        print(f"error: {error}")
        return 2
    # As the run scripts do, so that preflight looks at the cluster that a run would take.
    knows_cluster = config.trainer.device == "cpu" or os.environ.get("RAY_ADDRESS")
    if not knows_cluster and (address := cluster.cluster_of_this_node()):
        os.environ["RAY_ADDRESS"] = address
    with contextlib.redirect_stdout(sys.stderr):  # verl and vLLM log to stdout
        found = problems_by_check(config)
        lines = list(describe(config))
        if options.dry_run and not found[checks.VERL_AND_VLLM]:
            lines += commands(config, options.overrides)
    print_table(found)
    count = sum(len(problems or ()) for problems in found.values())
    print(*lines, f"{count} problem{'' if count == 1 else 's'}", sep="\n")
    return 2 if count else 0


if __name__ == "__main__":
    sys.exit(main())
