"""`sam doctor`: what this environment has; with a config, what a run of it would lack, red, with its mend."""

import contextlib
import json
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from sam.command import Parser
from sam_recipe import preflight
from sam_recipe.arguments import add_config_options, with_folder
from sam_recipe.launch import routing, sharing
from sam_recipe.launch.config import ConfigError, compose_config
from sam_recipe.launch.versions import engine_of_cpu, known
from sam_recipe.preflight import compatibility, machine, settings

WIDTH = 80  # of a terminal
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
    for name, problems in found.items():
        if problems:
            print(f"{red}red  {end} {name}", *(f"        {problem}" for problem in problems), sep="\n")
    fine = [name for name, problems in found.items() if not problems]
    for said, names in ((f"{green}green{end}", fine), ("skip, without the config's device:", skipped)):
        if names:
            print(textwrap.fill(f"{said} {', '.join(names)}", WIDTH, subsequent_indent="      "))
    count = sum(map(len, found.values()))
    print(*lines, f"{count} problem{'' if count == 1 else 's'}", sep="\n")
    return 2 if count else 0


def environment(as_json: bool) -> int:
    """Print what this environment has, and whether tests run with it. 2: some of it is refused."""
    device = "cpu" if engine_of_cpu() else next(filter(has_device, DEVICE_FILES), "cpu")
    found, versions = compatibility.of_machine(device), known()
    if as_json:
        print(json.dumps({"device": device, "checked": found} | versions, indent=2))
    else:
        shown = ("sam-rollout", "commit", "cpu", "cores")
        print(textwrap.fill("; ".join([device, *(f"{name} {versions[name]}" for name in shown)]), WIDTH))
        print(*(f"{verdict:<10}{feature}: {value}" for feature, (value, verdict) in found.items()), sep="\n")
        print("sam doctor --config-name NAME [overrides] checks a run; --json is for an issue")
    return 2 if any(verdict == "refused" for _, verdict in found.values()) else 0


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
    parser = Parser(prog="sam doctor", description=__doc__)
    add_config_options(parser, required=False)
    parser.add_argument("--weights", type=Path, help="in place of a config: whether this model's weights are all there")
    parser.add_argument("--npu-selftest", action="store_true", help="parity, precision and timing on the device itself")
    parser.add_argument("--output", type=Path, default=Path("outputs/npu_selftest"), help="folder for its report")
    parser.add_argument("--device", default="npu", help="cpu: its engines in float32 and without torch.compile")
    parser.add_argument("--json", action="store_true", help="what this environment has, for an issue")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, for example speculation=off")
    options = with_folder(parser.parse_intermixed_args(arguments))
    asked = options.config_name or options.weights or options.npu_selftest
    if options.json and asked or options.overrides and not options.config_name:
        parser.error("--json goes alone, overrides go with --config-name: leave out the other")
    if not asked:
        return environment(options.json)
    if options.npu_selftest:
        from sam_recipe.preflight.npu_selftest import selftest

        return selftest(options.output, options.device)
    if options.weights:
        return weights(options.weights)
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
