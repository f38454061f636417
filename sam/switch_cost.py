"""`python -m sam.switch_cost`: measures how long a policy decides in an engine step, by running requests."""

import argparse
import time

import numpy as np

from sam.switch.policies import make_policy
from sam.switch.policy import StepState
from sam.switch.step_cost import linear

REPEATS = 300


def decide_microseconds(running: int, longest: int) -> float:
    """Median microseconds of `plan`, `choose` and `observe`, with new drafts of `longest` tokens in each step."""
    rng = np.random.default_rng(0)
    policy = make_policy("goodput", longest, 0, step_cost=linear(63.0, 0.0, 1.0))
    offsets = np.arange(running + 1) * longest
    times = []
    for step in range(REPEATS):
        acceptance = np.sort(rng.random((running, longest)), axis=1)[:, ::-1].astype(np.float32).ravel()
        state = StepState(running, context=float(step))
        policy._cool_down = 0  # a step that is decided, not one that is passed over
        started = time.perf_counter()
        policy.plan(state)
        drafted = int(policy.choose(state, acceptance, offsets).sum())
        policy.observe(state, drafted, drafted, 63.0 + running + drafted)
        times.append(time.perf_counter() - started)
    return 1e6 * float(np.median(times[10:]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sam.switch_cost", description=__doc__.splitlines()[0])
    parser.add_argument("--draft-tokens", type=int, default=6)
    options = parser.parse_args()
    for running in (1, 8, 64, 256, 1024):
        print(f"{running:5} requests: {decide_microseconds(running, options.draft_tokens):6.1f} microseconds")


if __name__ == "__main__":
    main()
