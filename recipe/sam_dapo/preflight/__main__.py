"""`sam doctor`: what this environment has; with a config, what a run of it would lack and what to do about it."""

import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from omegaconf import DictConfig

from recipe.sam_dapo import patches_of_verl, preflight
from recipe.sam_dapo.arguments import add_config_options, with_folder
from recipe.sam_dapo.launch import routing, sharing
from recipe.sam_dapo.launch.config import ConfigError, compose_config
from recipe.sam_dapo.launch.versions import engine_of_cpu, known
from recipe.sam_dapo.preflight import compatibility, device_memory, machine, settings, vllm_command
from sam.command import Parser, quiet, run_command, waiting

ON_ITS_CPU = "bash scripts/run_dapo_tiny_cpu.sh trains on its CPU, and so does every config with scale=smoke"


def tick(line: str) -> str:
    """A line about what is as it must be."""
    return f"{_mark('✓')} {line}"


def cross(line: str) -> str:
    """A line about a problem."""
    return f"{_mark('✗')} {line}"


def _mark(mark: str) -> str:
    """The mark, or a word where the screen cannot show it."""
    try:
        mark.encode(sys.stdout.encoding or "ascii")
    except UnicodeEncodeError:
        return {"✓": "ok", "✗": "error:"}[mark]
    return mark


def describe(config: DictConfig) -> Iterator[str]:
    """Lines about a run that is still to start: warnings, what it consists of, the memory that it takes."""
    yield from (f"warning: {warning}" for warning in compatibility.warnings(config))
    trainer = config.trainer
    rollout = config.actor_rollout_ref.rollout
    size = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    replicas = device_memory.device_count(config) // size
    yield (
        f"{trainer.nnodes} nodes x {trainer.n_gpus_per_node} {trainer.device} devices; rollout: {replicas} replicas of "
        f"{size}, with up to {rollout.max_num_seqs} requests on each data-parallel rank; training: "
        f"{config.actor_rollout_ref.actor.strategy}"
    )
    yield f"routing: {routing.describe(config)}; sharing: {sharing.describe(config)}"
    yield device_memory.describe(config)


def look(config: DictConfig) -> Iterator[tuple[str, list[str]]]:
    """What is looked at and the problems found there: what `sam run --check` looks at, then what takes longer."""
    is_missing = bool(list(machine.missing_device(config)))
    yield from preflight.look(config)
    with waiting("asking verl and vLLM"), quiet():
        refused = list(vllm_command.what_verl_and_vllm_say(config))
    yield "verl and vLLM", refused
    if config.trainer.nnodes > 1 and not is_missing:
        os.environ.setdefault("RAY_ADDRESS", "auto")  # the cluster that a run would take
    if os.environ.get("RAY_ADDRESS"):
        with waiting("asking the nodes of the Ray cluster"), quiet():
            problems = list(machine.ray_cluster(config, preflight.node_problems))
        yield "nodes", problems


def check_run(config: DictConfig, as_json: bool) -> int:
    """Print what is looked at, as soon as it is known, then about the run; 2: something is wrong."""
    problems = []
    for name, lines in look(config):
        problems += lines
        if not as_json:
            _print(map(cross, lines) if lines else [tick(name)])
    notes = list(describe(config))
    if as_json:
        print(json.dumps({"problems": problems, "notes": notes}))
    else:
        _print([*notes, preflight.counted(problems)])
    return 2 if problems else 0


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


def check_environment(as_json: bool) -> int:
    """Print what this environment has. 2: some of it is refused."""
    accelerators = list(filter(machine.has_device, machine.DEVICE_FILES))
    device = "cpu" if engine_of_cpu() or not accelerators else accelerators[0]
    with waiting("looking at packages"):
        rows = list(compatibility.installed_parts(device))
    problems = [wrong for *_, wrong in rows if wrong]
    versions = known()
    if as_json:
        values = {"device": device, **versions}
        values |= {name: value for name, value, _wrong in rows}
        print(json.dumps({"problems": problems, "environment": values}, default=str))
        return 2 if problems else 0
    if not accelerators:
        print(f"no accelerator here: {ON_ITS_CPU}")
    _print(cross(wrong) if wrong else tick(f"{name}: {value}") for name, value, wrong in rows)
    shown = {name.lower() for name, *_ in rows}
    others = [f"{name} {version}" for name, version in versions.items() if name not in shown]
    print("; ".join([f"device {device}", *others]))
    if device == "cpu" and versions["vllm"]:
        with waiting("timing a linear layer"), quiet():
            from sam.vllm.cpu_fixes import describe  # vLLM

            speed = describe()
        print(speed)
    print(f"{preflight.counted(problems)}; sam doctor --config-name NAME [overrides] checks a run")
    return 2 if problems else 0


def check_weights(folder: Path, as_json: bool) -> int | str:
    """What to say of weights that are whole; ConfigError: they are not."""
    problems = list(settings.weights(folder))
    if as_json:
        print(json.dumps({"problems": problems}))
        return 2 if problems else 0
    for line in problems:
        raise ConfigError(line)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return f"{folder}: complete, {size / 1e9:.1f} GB of weights"


def main(arguments: list[str] | None = None) -> int:
    """0: nothing is wrong. 2: something is, or the config cannot be composed."""
    parser = Parser(prog="sam doctor", description=__doc__)
    add_config_options(parser, required=False)
    parser.add_argument("--weights", type=Path, help="in place of a config: whether this model's weights are all there")
    parser.add_argument("--patches", action="store_true", help="all that is replaced of other packages, and why")
    parser.add_argument("--npu-selftest", action="store_true", help="parity, precision and timing on the device itself")
    parser.add_argument("--output", type=Path, default=Path("outputs/npu_selftest"), help="folder for its report")
    parser.add_argument("--device", default="npu", help="cpu: its engines in float32 and without torch.compile")
    parser.add_argument("--json", action="store_true", help="print one object (docs/bench.md)")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, for example speculation=off")
    options = with_folder(parser.parse_intermixed_args(arguments))
    if options.overrides and not options.config_name:
        parser.error("overrides go with --config-name: add it")
    if options.json and (options.npu_selftest or options.patches):
        parser.error("--json goes with a config, with --weights, or alone: leave it out")
    if options.npu_selftest:
        from recipe.sam_dapo.preflight.npu_selftest import selftest

        return selftest(options.output, options.device)
    if options.patches:
        return run_command(patches_of_verl.listed)
    if options.weights:
        return run_command(lambda: check_weights(options.weights, options.json))
    if not options.config_name:
        return check_environment(options.json)
    try:
        with waiting("reading the config"):
            config = compose_config(options.config_name, options.overrides)
    except ConfigError as error:
        if options.json:
            print(json.dumps({"problems": [str(error)], "notes": []}))
        else:
            print(f"error: {error}", file=sys.stderr)
        return 2
    return run_command(lambda: check_run(config, options.json))


if __name__ == "__main__":
    sys.exit(main())
