"""`python -m recipe.preflight --config-name X [--dry-run] [--json] [overrides]`: a table, red lines with their mend."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from recipe import preflight, preflight_memory
from recipe.configuration import ConfigError, compose_config

DEVICE_CHECKS = ("versions", "Ascend: pairing and patches")


def has_npu() -> bool:
    return any(Path("/dev").glob("davinci[0-9]*"))


def report(config: DictConfig, dry_run: bool) -> dict:
    """Everything that preflight can say: `problems` by subject, `warnings`, `estimate`, `topology`, with dry_run also
    the command lines. Imports verl and vLLM, which takes half a minute."""
    found = {name: list(problems) for name, problems in preflight.checks(config).items()}
    skipped = {}
    if config.trainer.device == "npu" and not has_npu():
        # A laptop's torch is another, and CANN is not there: what is checked is the config.
        skipped = {name: found.pop(name) for name in DEVICE_CHECKS}
    found["verl's own validation"] = list(_verl(config))
    parsed = list(_vllm(config))
    found["vLLM's argument parser"] = [line for line in parsed if isinstance(line, str)]
    command = next((line for line in parsed if isinstance(line, list)), [])
    found["Ray cluster"] = list(_cluster(config))
    result = {
        "problems": found,
        "skipped": skipped,
        "warnings": list(preflight.find_warnings(config)),
        "estimate": preflight_memory.describe(config),
        "topology": topology(config),
        "sampler": {
            "drafter": config.speculation.method,
            "verification": config.speculation.verification,
            "proposer": (config.actor_rollout_ref.rollout.engine_kwargs.vllm.get("speculative_config") or {}).get(
                "model"
            ),
        },
    }
    if dry_run:
        result["command"] = f"python -m recipe.main_dapo --config-name {config.config_name}"
        result["vllm"] = command
    return result


def topology(config: DictConfig) -> str:
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    devices = trainer.nnodes * trainer.n_gpus_per_node
    replica = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    return (
        f"{trainer.nnodes} nodes x {trainer.n_gpus_per_node} {trainer.device} devices; rollout: {devices // replica} "
        f"replicas of {replica}, up to {rollout.max_num_seqs} requests each; training: "
        f"{config.actor_rollout_ref.actor.strategy}"
    )


def _verl(config: DictConfig) -> Iterator[str]:
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    try:
        validate_config(config, use_reference_policy=False, use_critic=False)
        for part in ("actor", "rollout"):
            omega_conf_to_dataclass(config.actor_rollout_ref[part])
    except Exception as error:
        yield f"verl refuses the config: {str(error).strip().splitlines()[0]}"


def _vllm(config: DictConfig) -> Iterator[str | list[str]]:
    """The command line, or a problem."""
    from recipe.vllm_command import vllm_arguments

    try:
        yield vllm_arguments(config)[0]
    except Exception as error:
        yield f"vLLM refuses the command line: {str(error).strip().splitlines()[-1]}"


def _cluster(config: DictConfig) -> Iterator[str]:
    """With RAY_ADDRESS set: whether the cluster has the devices, on as many nodes."""
    if not os.environ.get("RAY_ADDRESS"):
        return
    import ray

    resource = {"npu": "NPU", "cuda": "GPU"}.get(config.trainer.device, "CPU")
    try:
        ray.init(address=os.environ["RAY_ADDRESS"], logging_level="ERROR", log_to_driver=False)
        nodes = [node["Resources"].get(resource, 0) for node in ray.nodes() if node["Alive"]]
        ray.shutdown()
    except Exception as error:
        yield (
            f"RAY_ADDRESS={os.environ['RAY_ADDRESS']}: no cluster answers ({str(error).splitlines()[0]}): start it "
            "with bash scripts/start_ray_cluster.sh, or unset RAY_ADDRESS"
        )
        return
    wanted, whole = config.trainer.nnodes, config.trainer.n_gpus_per_node
    if (complete := sum(count >= whole for count in nodes)) < wanted:
        yield (
            f"{complete} of {wanted} nodes are in the Ray cluster with {whole} {resource} each (found: "
            f"{sorted(map(int, nodes), reverse=True)}): start the others with scripts/start_ray_cluster.sh worker"
        )


def _print(result: dict) -> None:
    green, red, end = ("\033[32m", "\033[31m", "\033[0m") if sys.stdout.isatty() else ("", "", "")
    for name, problems in result["problems"].items():
        print(f"{red}red  {end} {name}" if problems else f"{green}green{end} {name}")
        for problem in problems:
            print(f"        {problem}")
    for name in result["skipped"]:
        print(f"skip  {name}: no NPU in this machine")
    for warning in result["warnings"]:
        print(f"warning: {warning}")
    print(result["topology"])
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
        from recipe.npu_selftest import markdown, selftest

        selftested = selftest(options.output, options.device, compiled=not options.no_compile, dtype=options.dtype)
        print(markdown(selftested))
        return int(any("error" in row for row in selftested["engines"].values()))
    if options.config_name is None:
        parser.error("give --config-name or --npu-selftest")
    try:
        config = compose_config(options.config_name, options.overrides)
    except ConfigError as error:
        print(json.dumps({"error": str(error)}) if options.json else f"error: {error}")
        return 2
    with contextlib.redirect_stdout(sys.stderr):  # verl and vLLM log to stdout
        result = report(config, options.dry_run)
    if options.dry_run and options.overrides:
        result["command"] += " " + shlex.join(options.overrides)
    print(json.dumps(result, indent=1)) if options.json else _print(result)
    return 2 if any(result["problems"].values()) else 0
