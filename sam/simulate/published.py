"""The published set-ups (cann-recipes-train, llm_rl/qwen3, docs/llm_rl/sam_decoding.md): their figures, reproduced from
their settings with step costs fitted to them, and what other policies are predicted to give there.

`python -m sam.simulate.published` prints the first, `--predict` both; sam.simulate.published_fit fits anew.

What is known: sizes, k, thresholds, seconds of a rollout with and without speculation, for the 32B the tail's share
(their figure 3.2.4: 1436 of 4159 s, read off its bars) and its speed-up. What is assumed: decoding without drafts waits
for the host (they run without graphs), so that a step takes `fixed` milliseconds whatever runs; verifying takes
VERIFY_FIXED more (their rejection sampler: over 50 ms, reduced to about a tenth) and `verify` for each draft token and
1024 tokens of context (their attention kernel, which they say gets much slower with batch and length), and what half
of a die's 376 TFLOPS takes to compute a token. Lengths are log-normal, as wide and as alike within a prompt as in
recordings of long chains of thought.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace

import numpy as np
from tqdm import tqdm

from sam.simulate.acceptance import Acceptance
from sam.simulate.cost import SHIPPED, load_step_cost
from sam.simulate.engine import Cluster
from sam.simulate.lengths import LogNormal, Round
from sam.simulate.rollout import Choice, Drawn, Outcome, simulate
from sam.switch.step_cost import StepCost

SIGMA, CORRELATION, CAP, PROMPT_TOKENS = 0.6, 0.35, 34816, 128
SAMPLES, PREDICTED_SEEDS = 16, 2
VERIFY_FIXED = 5.0
TAIL_CONTEXT = 20480
FITTED = "FITTED TO PUBLISHED FIGURES, NOT MEASURED"


@dataclass(frozen=True)
class Published:
    """A set-up and its figures.

    Attributes:
        seeds: rounds to average.
        per_draft_token_ms: milliseconds that a draft token adds to a step, whatever the context.
        rounds_a_step: of dynamic sampling, as the published seconds of a round say; None: fitted.
        off, on: seconds of a step's rollout without and with speculation; gains are off / on - 1, as published.
        round_off, round_on: seconds of a round in the mean of all replicas, where published.
        tail: share of the rollout without speculation, and its speed-up.
        mean: tokens of a response, where published.
    """

    cluster: Cluster
    prompts: int
    choice: Choice
    off: float
    on: float
    round_off: float | None = None
    round_on: float | None = None
    tail: tuple[float, float] | None = None
    mean: float | None = None
    rounds_a_step: int | None = None
    seeds: int = 6
    per_draft_token_ms: float = 0.044

    def rounds(self, mean: float) -> list[Round]:
        """Draw the rounds, for a mean response length in tokens."""
        lengths = LogNormal(mean, CAP, SIGMA, CORRELATION)
        return [lengths.draw(self.prompts, SAMPLES, PROMPT_TOKENS, seed) for seed in range(self.seeds)]

    @property
    def gains(self) -> list[float]:
        """Published off / on - 1, in percent: of a step, and of a round where published."""
        pairs = [(self.off, self.on), (self.round_off, self.round_on)]
        return [100 * (off / on - 1) for off, on in pairs if off and on]


def _published(k: int, threshold: int) -> Choice:
    return Choice("threshold", k, threshold, scope="request")


SETUPS = {
    # Qwen3-32B, 32 dies, TP8: 4 replicas.
    "qwen3_32b": Published(
        Cluster(replicas=4, max_num_seqs=128),
        prompts=96,
        choice=_published(3, 8),
        rounds_a_step=1,
        off=4159.06,
        on=3793.29,
        round_off=3904.22,
        round_on=3548.62,
        tail=(1436 / 4159, 1.35),
    ),
    # Qwen3-32B, 128 dies, TP8: 16 replicas.
    "qwen3_32b_128die": Published(
        Cluster(replicas=16, max_num_seqs=256),
        prompts=1536,
        choice=_published(4, 4),
        seeds=4,
        off=9094.0,
        on=8223.0,
    ),
    # Qwen3-235B, 128 dies, TP4 EP128: 32 data-parallel ranks, synchronous.
    "qwen3_235b": Published(
        Cluster(replicas=32, max_num_seqs=64, dp_synchronous=True),
        prompts=128,
        choice=_published(3, 8),
        rounds_a_step=2,
        seeds=1,
        off=14287.54,
        on=12811.98,
        round_off=7102.92,
        round_on=6467.52,
        mean=10119.23,
        per_draft_token_ms=0.059,
    ),
}


def shipped_acceptance(drafter: str, k: int) -> Acceptance:
    """Load the table that this package ships for a drafter and a draft length.

    Raises:
        ValueError: there is none.
    """
    path = SHIPPED / f"acceptance_{drafter}_k{k}.json"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; name a recording to draft on with --acceptance")
    return Acceptance.load(path)


def fitted_cost(fixed: float, verify: float, per_draft_token_ms: float, **fingerprint) -> StepCost:
    """fixed + VERIFY_FIXED with drafts + draft tokens x (per_draft_token_ms + verify x context / 1024) milliseconds."""
    requests, tokens, context = np.array([1, 256]), np.array([1, 2, 16]), np.array([1, 40960])
    r, m, c = np.meshgrid(requests, tokens, context, indexing="ij")
    cells = fixed + VERIFY_FIXED * (m > 1) + r * (m - 1) * (per_draft_token_ms + verify * c / 1024)
    return StepCost(requests, tokens, context, cells, fingerprint, FITTED)


def play(
    setup: Published, cost: StepCost, choice: Choice, mean: float, drafter: str = "first-occurrence", progress=None
) -> Outcome:
    """The mean round of a published set-up."""
    rounds = setup.rounds(mean)
    acceptance = Drawn(shipped_acceptance(drafter, choice.k))
    outcome, _ = simulate(rounds, setup.cluster, choice, cost, acceptance, setup.choice.threshold, progress)
    seconds = ("seconds", "mean_seconds", "tail_seconds")
    return replace(outcome, **{key: getattr(outcome, key) / len(rounds) for key in seconds})


def off(setup: Published) -> Choice:
    """The set-up without speculation."""
    return replace(setup.choice, policy="never")


def loaded(name: str) -> tuple[Published, StepCost, int, float]:
    """A set-up, its shipped step costs, and the mean length and rounds a step that were fitted with them."""
    cost = load_step_cost(name)
    return SETUPS[name], cost, int(cost.fingerprint["mean_response_tokens"]), float(cost.fingerprint["rounds_a_step"])


def gain(setup: Published, cost: StepCost, choice: Choice, mean: float) -> float:
    """Percent by which the rollout without speculation takes longer, as published."""
    without, with_ = (play(setup, cost, one, mean).seconds for one in (off(setup), choice))
    return 100 * (without / with_ - 1)


def reproduce(name: str) -> dict:
    """Published and simulated figures side by side."""
    setup, cost, mean, rounds = loaded(name)
    without, with_ = (play(setup, cost, choice, mean) for choice in (off(setup), setup.choice))
    return {
        "setup": name,
        "published_gain_percent": [round(percent, 2) for percent in setup.gains],
        "gain_percent": round(100 * (without.seconds / with_.seconds - 1), 2),
        "mean_gain_percent": round(100 * (without.mean_seconds / with_.mean_seconds - 1), 2),
        "published_seconds": [setup.off, setup.on],
        "seconds": [round(rounds * one.seconds) for one in (without, with_)],
        "published_tail_speedup": setup.tail[1] if setup.tail else None,
        "tail_speedup": round(without.tail_seconds / with_.tail_seconds, 3),
        "accept_length": round(with_.accept_length, 3),
        "mean_response_tokens": mean,
        "rounds_a_step": rounds,
    }


def predictions(setup: Published) -> list[Choice]:
    """Settings to try instead of the published one, with sam's drafts."""
    published = setup.choice
    group = replace(published, scope="group")
    goodput = replace(group, policy="goodput")
    others = [replace(goodput, routing="prompt"), replace(goodput, routing="shared")]
    return [published, group, replace(goodput, scope="request"), goodput, *others, replace(others[1], k=8)]


def predict(name: str, progress=None) -> list[dict]:
    """The published switch with sam's drafts, and other policies, scopes and routings.

    Of fewer rounds than `reproduce` takes: gains differ from its by a point or two, and among each other by what they
    say. Each is predicted twice, since the published tails, which are all of long contexts, do not say what verifying
    costs in short ones: as fitted, and as much in every context as in theirs.
    """
    setup, cost, mean, _ = loaded(name)
    setup = replace(setup, seeds=min(setup.seeds, PREDICTED_SEEDS))
    without = play(setup, cost, off(setup), mean)
    rows = []
    for choice in predictions(setup):
        on = play(setup, cost, choice, mean, "sam", progress)
        cautious = play(setup, same_in_every_context(cost), choice, mean, "sam", progress)
        rows.append({
            "setup": name, "policy": choice.label, "scope": choice.scope, "routing": choice.routing,
            "gain_percent": round(100 * (without.seconds / on.seconds - 1), 2),
            "cautious_gain_percent": round(100 * (without.seconds / cautious.seconds - 1), 2),
            "tail_speedup": round(without.tail_seconds / on.tail_seconds, 3),
            "accept_length": round(on.accept_length, 3), "switched_on": round(on.switched_on, 3),
        })  # fmt: skip
    return rows


def same_in_every_context(cost: StepCost) -> StepCost:
    """The table with the costs of the published tails' context in every context."""
    far = float(TAIL_CONTEXT - cost.context[0]) / float(cost.context[-1] - cost.context[0])
    cells = (1 - far) * cost.milliseconds[..., :1] + far * cost.milliseconds[..., -1:]
    return StepCost(cost.requests, cost.tokens_per_request, cost.context[:1], cells, cost.fingerprint, cost.source)


def table(reproduced: list[dict], predicted: list[dict]) -> str:
    """Lay out the rows of `reproduce` and `predict` as text."""
    lines = [
        "gains are off / on - 1, as published; step costs are " + FITTED.lower(),
        f"{'set-up':18} {'published gain %':>17} {'simulated':>9} {'seconds, published':>19} {'simulated':>11} "
        f"{'tail':>5} {'simulated':>9}",
    ]
    for row in reproduced:
        gains = " and ".join(f"{gain:.2f}" for gain in row["published_gain_percent"])
        seconds = [" to ".join(f"{s:.0f}" for s in row[key]) for key in ("published_seconds", "seconds")]
        tail = f"{row['published_tail_speedup']:.2f}" if row["published_tail_speedup"] else ""
        lines.append(
            f"{row['setup']:18} {gains:>17} {row['gain_percent']:9.2f} {seconds[0]:>19} {seconds[1]:>14} {tail:>4} "
            f"{row['tail_speedup']:7.3f}"
        )
    if predicted:
        lines.append(
            f"{'predicted':18} {'policy':>17} {'scope':>8} {'routing':>13} {'gain %':>7} {'cautious':>8} {'tail':>6} "
            f"{'length':>7} {'on':>5}"
        )
    for row in predicted:
        lines.append(
            f"{row['setup']:18} {row['policy']:>17} {row['scope']:>8} {row['routing']:>13} {row['gain_percent']:7.2f} "
            f"{row['cautious_gain_percent']:8.2f} {row['tail_speedup']:6.3f} {row['accept_length']:7.3f} "
            f"{row['switched_on']:5.2f}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m sam.simulate.published", description=__doc__.splitlines()[0])
    parser.add_argument("--setup", nargs="+", choices=tuple(SETUPS), default=list(SETUPS))
    parser.add_argument("--predict", action="store_true", help="other policies too; minutes")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    options = parser.parse_args(arguments)
    try:
        reproduced = [reproduce(name) for name in tqdm(options.setup, unit="set-up", disable=None)]
        predicted = []
        for name in options.setup if options.predict else []:
            with tqdm(unit="tok", desc=name, mininterval=2.0, disable=None) as bar:
                predicted += predict(name, bar.update)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(
        json.dumps({"published": reproduced, "predicted": predicted}) if options.json else table(reproduced, predicted)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
