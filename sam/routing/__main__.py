"""`python -m sam.routing`: microseconds of a routing decision and entries held, for a rollout of equal chunks."""

import argparse
import sys
import time

import numpy as np

from sam.command import run_command
from sam.routing.policy import ContextPolicy, RoutingSettings


def measure(requests: int, replicas: int, slots: int, chunk: int) -> str:
    """Play a rollout of log-normal lengths, all replicas in step, with nothing but decisions in it."""
    lengths = np.clip(np.random.default_rng(0).lognormal(8.0, 0.8, requests), 1, 32768).astype(int).tolist()
    policy = ContextPolicy(RoutingSettings(chunk))
    began = time.perf_counter()
    for replica in range(replicas):
        policy.add_replica(str(replica), 1 << 20, slots)
    for name in range(requests):
        policy.arrive(str(name), str(name // 16), 512, 32768)
    generated, running, most = [0] * requests, policy.decide(), policy.entries
    while running:
        for name, _, tokens in running:
            number = int(name)
            left = lengths[number] - generated[number]
            generated[number] += min(left, tokens)
            policy.finish(name, left) if tokens >= left else policy.proceed(name, tokens)
        running, most = policy.decide(), max(most, policy.entries)
    seconds, decisions = time.perf_counter() - began, policy.counters["admissions"]
    return (
        f"{requests} requests over {replicas} replicas of {slots} slots, chunks of {chunk} tokens: {decisions} "
        f"decisions, {1e6 * seconds / decisions:.1f} us and {policy.operations[0] / decisions:.1f} heap operations "
        f"each, at most {most} entries"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sam.routing", description=__doc__.splitlines()[0])
    for name, default in (("requests", 10_000), ("replicas", 64), ("slots", 64), ("chunk", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    options = parser.parse_args(arguments)
    return run_command(lambda: measure(options.requests, options.replicas, options.slots, options.chunk))


if __name__ == "__main__":
    sys.exit(main())
