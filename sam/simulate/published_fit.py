"""`python -m sam.simulate.published_fit`: fits the step costs of the published set-ups to their figures, and writes
sam/simulate/step_costs/qwen3_*.json. Takes some minutes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

from sam.simulate.cost import SHIPPED
from sam.simulate.published import SETUPS, fitted_cost, gain, off, play
from sam.switch.step_cost import StepCost

TOLERANCE = 0.005  # of a figure


def solve(function: Callable[[float], float], low: float, high: float, target: float, steps: int = 6) -> float:
    """Where a function that falls from `low` to `high` meets the target, by false position.

    Raises:
        ValueError: the target is not between its values there.
    """
    at_low, at_high = function(low) - target, function(high) - target
    if at_low < 0 or at_high > 0:
        raise ValueError(
            f"no value from {low:g} to {high:g} meets {target:g}: {at_low + target:g}, {at_high + target:g}"
        )
    for _ in range(steps):
        middle = low + (high - low) * at_low / (at_low - at_high)
        value = function(middle) - target
        if abs(value) < TOLERANCE * abs(target):
            return middle
        if value > 0:
            low, at_low, at_high = middle, value, at_high / 2  # the Illinois rule: no end is kept for ever
        else:
            high, at_high, at_low = middle, value, at_low / 2
    return middle


def fit_32b() -> StepCost:
    """The mean length from the tail's share, `fixed` from the seconds, `verify` from the tail's speed-up."""
    setup, flat = SETUPS["qwen3_32b"], fitted_cost(100.0, 0.0, 0.0)

    def share(mean: float) -> float:
        outcome = play(setup, flat, off(setup), mean)
        return outcome.tail_seconds / outcome.seconds

    mean = round(solve(share, 5000.0, 12000.0, setup.tail[0]))
    without = play(setup, flat, off(setup), mean)
    fixed = round(100.0 * setup.off / without.seconds, 2)

    def tail_gain(verify: float) -> float:
        on = play(setup, fitted_cost(fixed, verify, setup.per_draft_token_ms), setup.choice, mean)
        return fixed / 100.0 * without.tail_seconds / on.tail_seconds

    verify = round(solve(tail_gain, 0.0, 0.5, setup.tail[1]), 4)
    return fitted_cost(fixed, verify, setup.per_draft_token_ms, **describe("Qwen3-32B, TP8", fixed, verify, mean, 1))


def fit_128die(cost: StepCost) -> StepCost:
    """The costs of the 32 dies; the mean from the gain, rounds a step from the seconds: two unknowns, two figures."""
    setup = SETUPS["qwen3_32b_128die"]
    mean = round(solve(lambda length: gain(setup, cost, setup.choice, length), 3500.0, 9000.0, setup.gains[0]))
    rounds = setup.off / play(setup, cost, off(setup), mean).seconds
    fixed, verify = (float(cost.fingerprint[key]) for key in ("fixed_ms", "verify_ms"))
    return fitted_cost(
        fixed, verify, setup.per_draft_token_ms, **describe("Qwen3-32B, TP8", fixed, verify, mean, rounds)
    )


def fit_235b() -> StepCost:
    """`fixed` from the seconds, `verify` from the gain, between that of a round and that of a step."""
    setup = SETUPS["qwen3_235b"]
    without = play(setup, fitted_cost(100.0, 0.0, 0.0), off(setup), setup.mean)
    fixed = round(100.0 * setup.off / setup.rounds_a_step / without.seconds, 2)

    def gain_of(verify: float) -> float:
        return gain(setup, fitted_cost(fixed, verify, setup.per_draft_token_ms), setup.choice, setup.mean)

    verify = round(solve(gain_of, 0.0, 0.5, float(np.mean(setup.gains))), 4)
    words = describe("Qwen3-235B, TP4 EP128", fixed, verify, setup.mean, setup.rounds_a_step)
    return fitted_cost(fixed, verify, setup.per_draft_token_ms, **words)


def describe(model: str, fixed: float, verify: float, mean: float, rounds: float) -> dict[str, str | int]:
    return {
        "model": model, "device": "Ascend A3, eager", "fixed_ms": str(fixed), "verify_ms": str(verify),
        "mean_response_tokens": round(mean), "rounds_a_step": f"{rounds:.2f}",
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m sam.simulate.published_fit", description=__doc__)
    parser.add_argument("--output", type=Path, default=SHIPPED, help="folder to write to (default: this package's)")
    options = parser.parse_args(arguments)
    if not options.output.is_dir():
        print(f"error: {options.output}: no such folder", file=sys.stderr)
        return 2
    first = fit_32b()
    for name, make in (
        ("qwen3_32b", lambda: first),
        ("qwen3_32b_128die", lambda: fit_128die(first)),
        ("qwen3_235b", fit_235b),
    ):
        cost = make()
        cost.save(options.output / f"{name}.json")
        print(f"{options.output / name}.json: {cost.fingerprint}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
