"""`python -m sam_recipe.preflight --config-name X [overrides]`: a table, red lines with their mend."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from sam_recipe import preflight
from sam_recipe.arguments import add_config_options, with_folder
from sam_recipe.launch import routing, sharing
from sam_recipe.launch.config import ConfigError, compose_config
from sam_recipe.preflight import machine, settings

DEVICE_FILES = {"npu": "davinci[0-9]*", "cuda": "nvidia[0-9]*"}


def has_device(device: str) -> bool:
    return device not in DEVICE_FILES or any(Path("/dev").glob(DEVICE_FILES[device]))


def describe(config: DictConfig) -> Iterator[str]:
    """Lines about a run that is still to start: warnings, what it consists of, the memory that it takes."""
    yield from (f"warning: {warning}" for warning in preflight.find_warnings(config))
    rollout, trainer, speculation = config.actor_rollout_ref.rollout, config.trainer, config.speculation
    ranks = rollout.data_parallel_size
    replica = rollout.tensor_model_parallel_size * ranks
    count = machine.device_count(config) // replica
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
    yield f"a node's memory, GiB at most: {machine.listed(machine.memory_parts(config)) or 'not known beforehand'}"
    yield machine.describe_device_memory(config)


def report(config: DictConfig) -> int:
    """Print what every check finds, then about the run; 2: something is wrong."""
    with contextlib.redirect_stdout(sys.stderr):  # verl and vLLM log to stdout; to import them takes half a minute
        skipped = {} if has_device(config.trainer.device) else preflight.select("device")
        found = {name: list(find(config)) for name, find in preflight.select().items() if name not in skipped}
        lines = list(describe(config))
    green, red, end = ("\033[32m", "\033[31m", "\033[0m") if sys.stdout.isatty() else ("", "", "")
    for name in preflight.select():
        if name in skipped:
            print(f"skip  {name}: no device of this config in this machine")
        else:
            print(f"{red}red  {end} {name}" if found[name] else f"{green}green{end} {name}")
        for problem in found.get(name, ()):
            print(f"        {problem}")
    count = sum(map(len, found.values()))
    print(*lines, f"{count} problem{'' if count == 1 else 's'}", sep="\n")
    return 2 if count else 0


def weights(folder: Path) -> int:
    lines = list(settings.weights(folder))
    for line in lines:
        print(f"error: {line}", file=sys.stderr)
    if not lines:
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        print(f"{folder}: complete, {size / 1e9:.1f} GB of weights")
    return 2 if lines else 0


def main(arguments: list[str] | None = None) -> int:
    """0: nothing is wrong. 2: something is, or the config cannot be composed."""
    parser = argparse.ArgumentParser(prog="sam doctor", description=__doc__)
    add_config_options(parser, required=False)
    parser.add_argument("--weights", type=Path, help="in place of a config: whether this model's weights are all there")
    parser.add_argument("--npu-selftest", action="store_true", help="parity, precision and timing on the device itself")
    parser.add_argument("--output", type=Path, default=Path("outputs/npu_selftest"), help="folder for its report")
    parser.add_argument("--device", default="npu", help="cpu: its engines in float32 and without torch.compile")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, for example speculation=off")
    options = with_folder(parser.parse_intermixed_args(arguments))
    if options.npu_selftest:
        from sam_recipe.preflight.npu_selftest import selftest

        return selftest(options.output, options.device)
    if options.weights:
        return weights(options.weights)
    if options.config_name is None:
        parser.error("give --config-name, --weights or --npu-selftest")
    try:
        config = compose_config(options.config_name, options.overrides)
        preflight.refuse(list(settings.keys(config)))
    except ConfigError as error:
        print(f"error: {error}")
        return 2
    # As the run scripts do, so that preflight looks at the cluster that a run would take.
    knows_cluster = config.trainer.device == "cpu" or os.environ.get("RAY_ADDRESS")
    if not knows_cluster and (address := machine.cluster_of_this_node()):
        os.environ["RAY_ADDRESS"] = address
    return report(config)


if __name__ == "__main__":
    sys.exit(main())
