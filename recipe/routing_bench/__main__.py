"""`python -m recipe.routing_bench`: routers on the same rollout, on two real engines of the tiny model on this machine.

The recipe's servers (verl's vLLM servers as Ray actors), verl's GlobalRequestLoadBalancer and the recipe's router and
client. All requests of a round are given at once, as in a training step of verl. Each response ends at a length that
is drawn or recorded beforehand; its other tokens are sampled as always, with a seed, and must be the same in all
variants with the same prompts. Each round has prompts and lengths of its own; the variants take turns in it, another
one first in every round.
"""

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from recipe.launch import environment
from recipe.launch.config import ConfigError, compose_config
from recipe.routing_bench.work import lengths_of

SPECULATION = {
    "off": ["speculation=off"],
    "sam": ["speculation=sam", "speculation.scope=group", "speculation.sharing=none"],
    "shared": ["speculation=sam", "speculation.scope=group", "speculation.sharing=replicas"],
}
IMPORTED_ONCE = ["recipe.routing_bench.servers", "recipe.rollout.router", "vllm.v1.engine.core"]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m recipe.routing_bench", description=__doc__.splitlines()[0])
    parser.add_argument("--assets", type=Path, default=Path("outputs/tiny_assets"), help="of recipe.tiny.assets")
    parser.add_argument("--rounds", type=int, default=5, help="that count; one before is a warm-up")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--slots", type=int, default=12, help="requests that run at once on a replica")
    parser.add_argument("--groups", type=int, default=12, help="prompts of a round")
    parser.add_argument("--samples", type=int, default=16, help="of each prompt")
    parser.add_argument("--chunk", nargs="+", type=int, default=[64], help="tokens of a chunk")
    parser.add_argument(
        "--mean", type=float, default=102, help="tokens of a response (default: as published, at a cap of 512)"
    )
    parser.add_argument("--ahead", type=int, default=2, help="routing.ahead (default: the recipe's)")
    parser.add_argument("--cap", type=int, default=512, help="most tokens of a response")
    parser.add_argument("--lengths", type=Path, help="recording to take them of, by one factor scaled to the cap")
    parser.add_argument("--sigma", type=float, default=0.6, help="of the lengths' logarithm")
    parser.add_argument("--correlation", type=float, default=0.35, help="share of its variance between prompts")
    parser.add_argument("--engines", nargs="+", choices=tuple(SPECULATION), default=tuple(SPECULATION))
    parser.add_argument(
        "--least-step-ms",
        type=float,
        default=0.0,
        help="that each engine step takes, as a decode step on an accelerator takes much the same whatever its rows; "
        "a shorter one waits at its end (default 0: as this machine does them)",
    )
    parser.add_argument("--identity", action="store_true", help="one round over all combinations: are tokens equal?")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--output", type=Path, help="folder for results.json, rollouts.png and the routers' logs")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if not (options.assets / "model" / "config.json").is_file():
        print(f"error: {options.assets}: no tiny model; build it with python -m recipe.tiny.assets", file=sys.stderr)
        return 2
    for name in ("rounds", "replicas", "slots", "groups", "samples"):
        if (value := getattr(options, name)) < 1:
            print(f"error: --{name} {value}: expected 1 or more", file=sys.stderr)
            return 2
    if options.least_step_ms < 0:
        print(f"error: --least-step-ms {options.least_step_ms}: expected 0 or more milliseconds", file=sys.stderr)
        return 2
    if options.identity and "off" not in options.engines:
        print(f"error: --engines {' '.join(options.engines)}: --identity compares with off: name it", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # short: Ray's sockets lie below
    try:
        configs = {name: make_config(options, name, folder) for name in options.engines}
        first = next(iter(configs.values()))
        environment.prepare(first, folder)
        return measure(options, configs, lengths_of(options), folder)
    except (ConfigError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def make_config(options: argparse.Namespace, engines: str, folder: Path):
    """The tiny CPU recipe's, with the slots and lengths asked for, and weights from the model's folder."""
    return compose_config(
        "dapo_tiny_cpu",
        [
            *SPECULATION[engines],
            f"assets={options.assets.resolve()}",
            f"run_dir={folder / engines}",
            f"trainer.n_gpus_per_node={options.replicas}",
            f"actor_rollout_ref.rollout.max_num_seqs={options.slots}",
            f"data.max_response_length={options.cap}",
            f"routing.ahead={options.ahead}",
            f"actor_rollout_ref.rollout.max_model_len={options.cap + 128}",
            f"actor_rollout_ref.rollout.response_length={options.cap}",
            "actor_rollout_ref.rollout.load_format=auto",
        ],
    )


def measure(options: argparse.Namespace, configs: dict, lengths: Callable, folder: Path) -> int:
    """Start Ray and the engines, run the rounds, print and write what they show."""
    import ray

    from recipe.trainer.task_runner import start_ray

    config, runtime_env = next(iter(configs.values())), environment.ray_runtime_env()
    quiet = {"log_to_driver": False, "logging_level": "ERROR"}
    start_ray(config, runtime_env, str(folder / "ray"), IMPORTED_ONCE, **quiet)
    try:
        result, text = asyncio.run(start_and_play(options, configs, lengths, options.output or folder))
    finally:
        ray.shutdown()
    result["options"] = {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()}
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result) if options.json else text)
    return 1 if any(row["identical"] is False for row in result["rows"]) else 0


async def start_and_play(options: argparse.Namespace, *start_with) -> tuple[dict, str]:
    """Start the engines and play what was asked for; the modules that it needs take seconds to import."""
    from recipe.routing_bench import identity, rounds
    from recipe.routing_bench.engines import Engines

    engines = await Engines.start(options, *start_with)
    try:
        return await (identity.play if options.identity else rounds.play)(options, engines)
    finally:
        await engines.stop_sharing()


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.exit(main())
