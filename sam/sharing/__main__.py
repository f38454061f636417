"""`python -m sam.sharing bench`: what the shards carry, and how late text arrives."""

import argparse
import os
import sys
from collections.abc import Iterator

from sam.command import run_command
from sam.config import RANGES, SpeculationConfig
from sam.sharing.played_engines import Load


def bench(options: argparse.Namespace) -> Iterator[str]:
    """The lines of a load's figures. Raises ValueError for a load that cannot be played."""
    from sam.sharing.bench import measure

    yield from measure(load_of(options), options.shards, options.machines).lines()


def load_of(options: argparse.Namespace) -> Load:
    """The load that options ask for. Raises ValueError where it cannot be played."""
    low, high = RANGES["sharing_shards"]
    if not low <= options.shards <= high:
        raise ValueError(f"--shards {options.shards}: expected {low} to {high}")
    for name in ("engines", "requests", "tokens_per_second", "group_size", "seconds", "interval_ms", "machines"):
        if (value := getattr(options, name)) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: expected 1 or more")
    if (requests := options.engines * options.requests) % options.group_size:
        raise ValueError(f"--group-size {options.group_size}: expected a divisor of the {requests} requests")
    if options.machines > options.engines:
        raise ValueError(f"--machines {options.machines}: expected at most the {options.engines} engines")
    names = ("engines", "requests", "tokens_per_second", "group_size", "seconds", "interval_ms")
    return Load(*(getattr(options, name) for name in names))


def main(arguments: list[str] | None = None) -> int:
    """0: done. 2: a load that cannot be played."""
    parser = argparse.ArgumentParser(prog="python -m sam.sharing", description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["bench"])
    parser.add_argument("--engines", type=int, default=64)
    parser.add_argument("--requests", type=int, default=64, help="that run in each engine (default 64)")
    parser.add_argument("--tokens-per-second", type=int, default=30, help="of each request (default 30)")
    parser.add_argument("--group-size", type=int, default=16, help="requests of a prompt, on as many engines (16)")
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--seconds", type=int, default=20, help="for which engines append (default 20)")
    parser.add_argument("--interval-ms", type=int, default=SpeculationConfig.sharing_interval_ms)
    machines = min(4, 2 * (os.cpu_count() or 1))
    parser.add_argument("--machines", type=int, default=machines, help=f"of the engines (default {machines})")
    options = parser.parse_args(arguments)
    return run_command(lambda: bench(options), errors=(ValueError, OSError))


if __name__ == "__main__":
    sys.exit(main())
