"""`python -m recipe.preflight --config-name X [--dry-run] [--json] [overrides]`: a table, red lines with their mend."""

import argparse
import contextlib
import json
import os
import shlex
import sys
from pathlib import Path

from omegaconf import DictConfig

from recipe.launch import routing, sharing
from recipe.launch.config import ConfigError, compose_config
from recipe.preflight import checks, cluster, device_memory, machine, speculation, vllm_command, vllm_refusals

DEVICE_FILES = {"npu": "davinci[0-9]*", "cuda": "nvidia[0-9]*"}


def has_device(device: str) -> bool:
    return device not in DEVICE_FILES or any(Path("/dev").glob(DEVICE_FILES[device]))


def report(config: DictConfig, dry_run: bool) -> dict:
    """Everything that preflight can say: `problems` by check, `skipped` checks, `warnings`, `estimate`, `topology`,
    `routing`, with dry_run also the command lines. Imports verl and vLLM, which takes half a minute."""
    is_laptop = not has_device(config.trainer.device)
    skipped = [check.name for check in checks.select(config, "device") if is_laptop]
    found = {check.name: list(check.find(config)) for check in checks.select(config) if check.name not in skipped}
    result = {
        "problems": found,
        "skipped": skipped,
        "warnings": list(checks.find_warnings(config)),
        "estimate": device_memory.describe(config),
        "topology": topology(config),
        "routing": routing.describe(config),
        "speculation": speculation.resolve(config)[0] | {"sharing": sharing.describe(config)},
        "memory": machine.memory_parts(config),
    }
    if dry_run:
        result["command"] = f"python -m recipe.main_dapo --config-name {config.config_name}"
        arguments = vllm_refusals.command_line(vllm_command.server_arguments(config))
        result["vllm"] = ["serve", config.actor_rollout_ref.model.path, *arguments]
    return result


def topology(config: DictConfig) -> str:
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    ranks = rollout.data_parallel_size
    replica = rollout.tensor_model_parallel_size * ranks
    count = device_memory.device_count(config) // replica
    each = "each" if ranks == 1 else f"on each of {ranks} data-parallel ranks"
    return (
        f"{trainer.nnodes} nodes x {trainer.n_gpus_per_node} {trainer.device} devices; rollout: {count} "
        f"replica{'s' * (count != 1)} of {replica}, up to {rollout.max_num_seqs} requests {each}; training: "
        f"{config.actor_rollout_ref.actor.strategy}"
    )


def _print(result: dict) -> None:
    green, red, end = ("\033[32m", "\033[31m", "\033[0m") if sys.stdout.isatty() else ("", "", "")
    for name, problems in result["problems"].items():
        print(f"{red}red  {end} {name}" if problems else f"{green}green{end} {name}")
        for problem in problems:
            print(f"        {problem}")
    for name in result["skipped"]:
        print(f"skip  {name}: no device of this config in this machine")
    for warning in result["warnings"]:
        print(f"warning: {warning}")
    print(result["topology"])
    print(f"routing: {result['routing']}")
    for name, what in result["speculation"].items():
        print(f"{name}: {what}")
    parts = ", ".join(f"{name} {gib:.1f}" for name, gib in result["memory"].items() if gib)
    print(f"a node's memory, GiB at most: {parts or 'nothing that is known beforehand'}")
    print(result["estimate"] or "no estimate of a device's memory: no accelerator, or no config.json of the model")
    if "command" in result:
        print(result["command"])
        print("vllm " + shlex.join(result["vllm"]))
    count = sum(map(len, result["problems"].values()))
    print(f"{count} problem{'' if count == 1 else 's'}")


def main(arguments: list[str] | None = None) -> int:
    """0: nothing is wrong. 2: something is, or the config cannot be composed."""
    parser = argparse.ArgumentParser(prog="python -m recipe.preflight", description=__doc__)
    parser.add_argument("--config-name", help="a file of configs/ without .yaml")
    parser.add_argument("--dry-run", action="store_true", help="also print the commands that would run")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--npu-selftest", action="store_true", help="parity, precision and timing on the device itself")
    parser.add_argument("--output", type=Path, default=Path("outputs/npu_selftest"), help="folder for its report")
    parser.add_argument("--device", default="npu", help="device of its timings")
    parser.add_argument("--no-compile", action="store_true", help="its graphs without torch.compile")
    parser.add_argument("--dtype", default="bfloat16", help="of its model")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, for example speculation=off")
    options = parser.parse_intermixed_args(arguments)
    if options.npu_selftest:
        from recipe.preflight.npu.selftest import markdown, selftest

        selftested = selftest(options.output, options.device, compiled=not options.no_compile, dtype=options.dtype)
        print(markdown(selftested))
        return int(any("error" in row for row in selftested["engines"].values()))
    if options.config_name is None:
        parser.error("give --config-name or --npu-selftest")
    try:
        config = compose_config(options.config_name, options.overrides)
        checks.check_keys(config)
    except ConfigError as error:
        print(json.dumps({"error": str(error)}) if options.json else f"error: {error}")
        return 2
    # As the run scripts do, so that preflight looks at the cluster that a run would take.
    knows_cluster = config.trainer.device == "cpu" or os.environ.get("RAY_ADDRESS")
    if not knows_cluster and (address := cluster.cluster_of_this_node()):
        os.environ["RAY_ADDRESS"] = address
    with contextlib.redirect_stdout(sys.stderr):  # verl and vLLM log to stdout
        result = report(config, options.dry_run)
    if options.dry_run and options.overrides:
        result["command"] += " " + shlex.join(options.overrides)
    print(json.dumps(result, indent=1)) if options.json else _print(result)
    return 2 if any(result["problems"].values()) else 0
