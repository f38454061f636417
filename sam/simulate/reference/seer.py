"""Seer's published ratios (arXiv 2511.14617v3) beside those that sam.simulate gives for rollouts of the same shapes.

Published: GPUs, those of an instance, prompts, samples, longest and mean lengths, the longest draft, the ratios, that a
pool holds the KV cache of chunks that move, and acceptance by siblings known (table 2, one path). Assumed: what a step
takes: weights, KV cache and each token's operations at half of an H800's peaks (a roofline), and that the ranks of a
data-parallel instance share their work and KV cache evenly. Fitted: `Fit`, to all ratios of all three tasks together.

Lengths, caches and chunks are divided by SCALE, and what a token of context costs is multiplied by it: the same rollout
in fewer steps.
"""

from dataclasses import dataclass

import numpy as np

from sam.simulate.acceptance import POSITIONS, Acceptance
from sam.simulate.engine import Cluster
from sam.simulate.lengths import LogNormal
from sam.simulate.rollout import Choice, Drawn, Outcome, simulate
from sam.switch.step_cost import StepCost

SCALE = 256
BANDWIDTH, OPERATIONS, MEMORY = 3.35e12, 0.99e15, 80e9  # of an H800: bytes a second, operations a second, bytes
REACHED, USED = 0.5, 0.9  # shares of its peaks, and of its memory that weights and KV cache take
LAUNCH_MS = 5.0  # of a step, whatever runs
PROMPT_TOKENS, SLOTS, CHUNK, K = 1024, 1024, 1024, 8
KNOWN, ACCEPT_LENGTHS = (0, 1, 5, 15), (1.70, 2.04, 2.32, 2.53)  # siblings known, mean acceptance length
ROUNDS = 3
RECORDS = 256  # verify steps of each number of siblings
PARTS = ("divided", "+ context", "+ drafts")
WITHIN = 15  # percent


@dataclass(frozen=True)
class Task:
    """A published task.

    Attributes:
        gpus, gpus_an_instance, prompts, samples, longest, mean: published; lengths in tokens.
        weights: bytes.
        active: parameters that compute a token.
        experts: share of a layer's experts that one token needs; 1: no experts. Steps read those that they need.
        kv_bytes: of a token's KV cache, over all GPUs of an instance.
        speeds: published, of the rollout over verl's, with each of PARTS.
        tails: published, time of the last tenth of the responses over verl's, with each of PARTS; None: not published.
        each: bytes of the weights that every GPU of an instance holds, where its attention is data parallel.
    """

    gpus: int
    gpus_an_instance: int
    prompts: int
    samples: int
    longest: int
    mean: int
    weights: float
    active: float
    experts: float
    kv_bytes: int
    speeds: tuple[float, float, float]
    tails: tuple[float | None, float | None, float | None]
    each: float = 0.0


# Tails: figure 10 is of Qwen2-VL-72B; all parts together as in figure 8 (278 of 1817 s, 123 of 2301, 850 of 3144).
TASKS = {
    "Moonlight": Task(
        *(32, 1, 400, 8, 65536, 22386, 32e9, 3e9, 6 / 64, 27 * 576 * 2),
        speeds=(1.41, 1.47, 1.90),
        tails=(None, None, 0.15),
    ),
    "Qwen2-VL-72B": Task(
        *(128, 8, 600, 16, 40960, 7615, 146e9, 72e9, 1.0, 80 * 8 * 128 * 2 * 2),
        speeds=(1.42, 1.56, 2.04),
        tails=(0.79, 0.11, 0.05),
    ),
    # Data parallel over 32 GPUs: each holds attention, shared experts and the dense layer (9.2e9 parameters in FP8) and
    # embeddings (2.35e9 in bfloat16), by the model's config.
    "Kimi-K2": Task(
        *(256, 32, 800, 8, 98304, 38959, 1.03e12, 32e9, 8 / 384, 61 * 576 * 2),
        speeds=(1.16, 1.27, 1.53),
        tails=(None, None, 0.27),
        each=13.9e9,
    ),
}


@dataclass(frozen=True)
class Fit:
    """What is fitted, the same for all tasks.

    Attributes:
        sigma: of the lengths' logarithm.
        correlation: share of its variance that a prompt's samples have in common.
        verify: what a draft token reads of its request's KV cache, as a share of what the step reads of it anyway.
    """

    sigma: float = 0.8
    correlation: float = 0.75
    verify: float = 0.1


def step_cost(task: Task, fit: Fit) -> StepCost:
    """Milliseconds of a step by the roofline, for lengths divided by SCALE."""
    bandwidth, operations = (task.gpus_an_instance * REACHED * peak / 1e3 for peak in (BANDWIDTH, OPERATIONS))
    axes = 4 ** np.arange(6), np.arange(1, K + 2), np.array([1, task.longest // SCALE])
    requests, tokens, context = np.meshgrid(*axes, indexing="ij")
    needed = 1 - (1 - task.experts) ** (requests * tokens)
    weights = task.each * task.gpus_an_instance + (task.weights - task.each) * needed
    read = weights + task.kv_bytes * SCALE * requests * context * (1 + fit.verify * (tokens - 1))
    cells = LAUNCH_MS + read / bandwidth + 2 * task.active * requests * tokens / operations
    return StepCost(*axes, cells, source="a roofline, not measured")


def cluster(task: Task) -> Cluster:
    """The task's instances; reading a token of context again costs its operations, in milliseconds of a scaled step."""
    instances = task.gpus // task.gpus_an_instance
    free = USED * MEMORY * task.gpus_an_instance - task.weights - task.each * (task.gpus_an_instance - 1)
    read_ms = 1e3 * 2 * task.active / (task.gpus_an_instance * REACHED * OPERATIONS)
    return Cluster(instances, SLOTS, kv_tokens=int(free / task.kv_bytes / SCALE), read_ms=read_ms, pool=True)


def acceptance() -> Acceptance:
    """Verify steps with the published mean acceptance lengths, every token accepted with the same probability."""
    cumulative, accepted = [], []
    chance = (np.arange(RECORDS) + 0.5) / RECORDS
    for mean in ACCEPT_LENGTHS:
        shares = np.linspace(0, 1, 10_001)[:, None] ** np.arange(1, K + 1)
        powers = shares[np.searchsorted(1 + shares.sum(axis=1), mean)]
        cumulative.append(np.broadcast_to(powers, (RECORDS, K)))
        accepted.append((chance[:, None] < powers).sum(axis=1))
    cells = np.zeros((len(KNOWN), len(POSITIONS)), dtype=[("start", np.int64), ("size", np.int64)])
    cells["start"], cells["size"] = RECORDS * np.arange(len(KNOWN))[:, None], RECORDS
    drafted = np.full(RECORDS * len(KNOWN), K)
    levels = np.array(KNOWN) + 1
    records = np.concatenate(cumulative).astype(np.float32), drafted, np.concatenate(accepted)
    return Acceptance(levels, cells, *records, source="Seer's table 2, one path")


def play(task: Task, fit: Fit, parts: tuple[str, ...] = ("verl", *PARTS)) -> dict[str, Outcome]:
    """Simulate rollouts of verl's, which sends all samples of a prompt to one instance, and with each part added; on
    demand in the order of an oracle that knows every length."""
    lengths = LogNormal(task.mean / SCALE, task.longest // SCALE, fit.sigma, fit.correlation)
    rounds = [lengths.draw(task.prompts, task.samples, PROMPT_TOKENS // SCALE, seed) for seed in range(ROUNDS)]
    plain = {"k": K, "scope": "request"}
    choices = {
        "verl": Choice("never", routing="prompt", **plain),
        "divided": Choice("never", router="divided", chunk=CHUNK // SCALE, **plain),
        "+ context": Choice("never", router="context", chunk=CHUNK // SCALE, **plain),
        "oracle": Choice("never", router="oracle", chunk=CHUNK // SCALE, **plain),
        "+ drafts": Choice("goodput", K, scope="group", routing="shared", router="context", chunk=CHUNK // SCALE),
    }
    table, cost, machines = acceptance(), step_cost(task, fit), cluster(task)
    return {
        part: simulate(rounds, machines, choices[part], cost, Drawn(lambda k: table), tail_threshold=1)[0]
        for part in parts
    }


def compare(fit: Fit | None = None) -> list[dict]:
    """A row for each task and part: speed and tail over verl's, published and simulated."""
    rows = []
    for name, task in TASKS.items():
        base, *outcomes = play(task, fit or Fit()).values()
        for part, published, published_tail, outcome in zip(PARTS, task.speeds, task.tails, outcomes, strict=True):
            speed = base.seconds / outcome.seconds
            rows.append({
                "task": name, "part": part, "published": published, "simulated": round(speed, 3),
                "percent": round(100 * (speed / published - 1), 1),
                "tail": round(outcome.last_tenth_seconds / base.last_tenth_seconds, 3),
                "published_tail": published_tail, "tail_of_verl": round(base.last_tenth_seconds / base.seconds, 3),
                "accept_length": round(outcome.accept_length, 2), "preempted_by_verl": base.preempted,
            })  # fmt: skip
    return rows


def table_of_seer(rows: list[dict], fit: Fit | None = None) -> str:
    fit = fit or Fit()
    lines = [
        f"Seer, speed over verl's, {ROUNDS} rounds; FITTED to all rows: sigma {fit.sigma:g}, correlation "
        f"{fit.correlation:g}, a draft token's reading {fit.verify:g}",
        f"{'task':14} {'':>10} {'published':>9} {'simulated':>9} {'off by':>7}   "
        f"{'tail':>9} {'simulated':>9}   of verl's",
    ]
    for row in rows:
        missed = "" if abs(row["percent"]) <= WITHIN else f"   not within {WITHIN} %"
        tail = "" if row["published_tail"] is None else f"{row['published_tail']:.2f}"
        lines.append(
            "{task:14} {part:>10} {published:9.2f} {simulated:9.2f} {percent:+6.1f}%".format(**row)
            + f"   {tail:>9} {row['tail']:9.2f}{missed}"
        )
    return "\n".join(lines)
