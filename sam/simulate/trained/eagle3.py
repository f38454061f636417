"""EAGLE3 on the published 32B: acceptance fitted to the one published gain, and what follows for other drafters.

verl's pull request 5509 (https://github.com/verl-project/verl/pull/5509) reports a rollout 51.51 % better with EAGLE3
on Qwen3-32B, A3, PPO on GSM8K, in the mean of the first ten training steps. It gives neither acceptance nor the number
of draft tokens nor the load. So acceptance is FITTED: one share for every position, with which this simulation gives
that gain for always drafting, in rounds of short responses as GSM8K's. The load is an assumption, and so the fit is
made for a small and a large one.
"""

from collections.abc import Callable

import numpy as np

from sam.simulate.engine import Cluster
from sam.simulate.lengths import LogNormal
from sam.simulate.rollout import Choice, simulate
from sam.simulate.setups import load_step_cost
from sam.simulate.trained.drafts import PASS_SHARE, TrainedDrafter

SETUP = "qwen3_32b"
PUBLISHED_GAIN = 51.51  # percent
K = 3  # draft tokens: an assumption
REPLICAS, MEAN, CAP, SIGMA, CORRELATION, PROMPT_TOKENS = 4, 300, 1024, 0.4, 0.35, 128  # of the load: assumptions
LOADS = (16, 256)  # requests of a replica
HALVINGS = 10
ROUTERS = ("verl", "context")
# Drafter and its options. EAGLE3 as in the pull request drafts always, and as in this project's engine when it pays.
DRAFTERS = {
    "EAGLE3, always": "--drafter eagle3 --policy always",
    "EAGLE3": "--drafter eagle3 --policy goodput",
    "sam, own replica": "--drafter sam --policy goodput",
    "sam, shared": "--drafter sam --policy goodput --routing shared",
    "hybrid, shared": "--drafter hybrid --policy goodput --routing shared",
}


def gain_of_always(share: float, requests: int) -> tuple[float, float]:
    """Percent gained, and mean acceptance length, if EAGLE3 always drafts in a round of short responses.

    Args:
        share: of the draft tokens accepted at each position, of those accepted up to there.
        requests: of a replica.
    """
    cost, cluster = load_step_cost(SETUP), Cluster(REPLICAS, max_num_seqs=requests)
    rounds = [LogNormal(MEAN, CAP, SIGMA, CORRELATION).draw(REPLICAS * requests, 1, PROMPT_TOKENS, 0)]
    choices = [Choice(policy, K, drafter="eagle3") for policy in ("never", "always")]
    trained = [TrainedDrafter((share,))]
    off, on = (simulate(rounds, cluster, choice, cost, None, 1, trained=trained)[0] for choice in choices)
    return 100 * (off.seconds / on.seconds - 1), on.accept_length


def fit_share(requests: int, gain: Callable[[float, int], tuple[float, float]] = gain_of_always) -> float | None:
    """The share with which always drafting gains PUBLISHED_GAIN; None if no share does."""
    if gain(1.0, requests)[0] < PUBLISHED_GAIN:
        return None
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if gain(middle, requests)[0] >= PUBLISHED_GAIN else (middle, high)
    return round(high, 4)


def compare(simulated: Callable[[str, str], list[dict]], loads: tuple[int, ...] = LOADS) -> dict:
    """Fit acceptance for each load, and predict the 32B's gains with it.

    Args:
        simulated: rows of a set-up with options, the first without speculation (sam.simulate.published.simulate).

    Returns:
        The fits, and a row for each drafter with percents gained over no speculation with verl's routing.
    """
    fits = [{"requests": n, "share": fit_share(n)} for n in loads]
    fits = [one for one in fits if one["share"] is not None]
    for one in fits:
        one["gain_percent"], one["accept_length"] = (round(x, 2) for x in gain_of_always(one["share"], one["requests"]))
    rows: list[dict] = []
    for router in ROUTERS:
        base = simulated(SETUP, f"--policy never --seeds 1 --router {router}")
        rows.append({"drafter": "off", "router": router, "gain_percent": [_gain(base[0], base[-1])] * len(fits)})
    for name, options in DRAFTERS.items():
        trained = "sam" not in name
        for router in ROUTERS:
            gains = []
            for one in fits if trained else fits[:1]:
                described = f" --draft-acceptance {one['share']}" if trained else ""
                off, *on = simulated(SETUP, f"{options} --k {K} --seeds 1 --router {router}{described}")
                gains.append(_gain(off, on[-1]))
            rows.append({"drafter": name, "router": router, "gain_percent": gains if trained else gains * len(fits)})
    return {"pass_share": PASS_SHARE, "k": K, "fits": fits, "rows": rows}


def _gain(off: dict, on: dict) -> float:
    return round(100 * (off["seconds"] / on["seconds"] - 1), 2)


def table_of_drafters(found: dict) -> str:
    """Lay out what `compare` returned as text."""
    fitted = "; ".join(
        f"{one['share']:.3f} with {one['requests']} requests a replica ({one['gain_percent']:.1f} %, mean acceptance "
        f"length {one['accept_length']:.2f})" for one in found["fits"]
    )  # fmt: skip
    lines = [
        f"FITTED to verl #5509's {PUBLISHED_GAIN} %: share of EAGLE3's tokens accepted at each position: {fitted}",
        f"ASSUMED: {found['k']} draft tokens, a pass: {found['pass_share']:.0%} of a step, short responses in the fit",
        f"PREDICTED for {SETUP}: gains in percent over no speculation with verl's routing, one column a fit",
    ]
    names = np.unique([row["drafter"] for row in found["rows"]], return_index=True)[1]
    for first in sorted(names):
        name = found["rows"][first]["drafter"]
        of_name = [row for row in found["rows"] if row["drafter"] == name]
        cells = [f"{row['router']}: {' '.join(f'{g:8.2f}' for g in row['gain_percent'])}" for row in of_name]
        lines.append(f"{name:18} {'   '.join(cells)}")
    return "\n".join(lines)
