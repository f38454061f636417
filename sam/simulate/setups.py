"""What this package ships: the published set-ups (cann-recipes-train, llm_rl/qwen3, docs/llm_rl/sam_decoding.md) with
their figures, tables of step costs that were fitted to these, and tables of acceptance.

What is known: sizes, k, thresholds, seconds of a rollout with and without speculation, for the 32B the tail's share
(their figure 3.2.4: 1436 of 4159 s, read off its bars) and its speed-up. What is assumed: decoding without drafts waits
for the host (they run without graphs), so that a step takes `fixed` milliseconds whatever runs; verifying takes 5 ms
more (their rejection sampler: over 50 ms, reduced to about a tenth) and `verify` for each draft token and 1024 tokens
of context (their attention kernel, which they say gets much slower with batch and length), and what half of a die's 376
TFLOPS takes to compute a token. Lengths are log-normal, as wide and as alike within a prompt as in recordings of long
chains of thought. The tables named `cautious` cost in every context what the published tails' 20,480 tokens do.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from sam.simulate.acceptance import Acceptance
from sam.simulate.engine import Cluster
from sam.simulate.rollout import Choice
from sam.switch.step_cost import StepCost

SHIPPED = Path(__file__).parent / "step_costs"
SIGMA, CORRELATION, CAP, PROMPT_TOKENS = 0.6, 0.35, 34816, 128
SAMPLES = 16


@dataclass(frozen=True)
class Published:
    """A set-up and its figures.

    Attributes:
        seeds: rounds to average.
        off, on: seconds of a step's rollout without and with speculation; gains are off / on - 1, as published.
        round_off, round_on: seconds of a round in the mean of all replicas, where published.
        tail_speedup: where published.
    """

    cluster: Cluster
    prompts: int
    choice: Choice
    seeds: int
    off: float
    on: float
    round_off: float | None = None
    round_on: float | None = None
    tail_speedup: float | None = None

    @property
    def gains(self) -> list[float]:
        """Published off / on - 1, in percent: of a step, and of a round where published."""
        pairs = [(self.off, self.on), (self.round_off, self.round_on)]
        return [100 * (off / on - 1) for off, on in pairs if off and on]


SETUPS = {
    # Qwen3-32B, 32 dies, TP8: 4 replicas.
    "qwen3_32b": Published(
        Cluster(replicas=4, max_num_seqs=128),
        prompts=96,
        choice=Choice("threshold", 3, 8, scope="request"),
        seeds=6,
        off=4159.06,
        on=3793.29,
        round_off=3904.22,
        round_on=3548.62,
        tail_speedup=1.35,
    ),
    # Qwen3-32B, 128 dies, TP8: 16 replicas.
    "qwen3_32b_128die": Published(
        Cluster(replicas=16, max_num_seqs=256),
        prompts=1536,
        choice=Choice("threshold", 4, 4, scope="request"),
        seeds=4,
        off=9094.0,
        on=8223.0,
    ),
    # Qwen3-235B, 128 dies, TP4 EP128: 32 data-parallel ranks, synchronous.
    "qwen3_235b": Published(
        Cluster(replicas=32, max_num_seqs=64, dp_synchronous=True),
        prompts=128,
        choice=Choice("threshold", 3, 8, scope="request"),
        seeds=1,
        off=14287.54,
        on=12811.98,
        round_off=7102.92,
        round_on=6467.52,
    ),
}


def load_step_cost(name: str) -> StepCost:
    """Load a table from a file, or by the name of one that this package ships.

    Raises:
        ValueError: no such file or name, or not a table.
    """
    path = Path(name)
    if path.suffix == ".json" or path.exists():
        return StepCost.load(path)
    if (shipped := SHIPPED / f"{name}.json").is_file():
        return StepCost.load(shipped)
    raise ValueError(f"step cost {name!r}: neither a file nor one of {', '.join(shipped_step_costs())}")


def shipped_step_costs() -> list[str]:
    """Names of the tables that this package ships."""
    return sorted(path.stem for path in SHIPPED.glob("*.json") if not path.stem.startswith("acceptance"))


@cache
def shipped_acceptance(drafter: str, k: int) -> Acceptance:
    """Load the table that this package ships for a drafter and a draft length.

    Raises:
        ValueError: there is none.
    """
    path = SHIPPED / f"acceptance_{drafter}_k{k}.json"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; name a recording to draft on with --acceptance")
    return Acceptance.load(path)
