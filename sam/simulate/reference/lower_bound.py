"""How far from the best a router can be that does not know lengths: the least steps that any such router takes.

`python -m sam.simulate.reference.lower_bound` draws log-normal rounds, plays them where every step takes the same, and
prints their steps beside the bound. It holds even for routers that know the distribution of every prompt's lengths and
move and interrupt responses at no cost.

At the time after which no response waits, as many responses are unfinished as there are slots (n). Whoever does not
know lengths has, of each of them, the distribution F of the tokens R that it still lacks: that of its prompt's lengths,
given how many it has. From then on slots are idle for n E[max R] - E[sum R] steps in the mean. That is the integral of
n (1 - prod F) - sum (1 - F), and since prod F <= (mean F)^n and F - F^n is concave, it is at least the sum over the n
responses of h = integral of F - F^n. Which responses these are and how far is the router's choice, of those that the
drawn lengths allow: the bound takes the n smallest h, each at the best number of tokens below the response's length.

Beside them: speed and tail over verl's balancer, and two routers that are told what no estimate of a prompt can better,
the distribution of its lengths (`told`): before the rollout, or once every slot has been filled for the first time.
"""

import argparse
import heapq
import sys
from functools import partial
from typing import NamedTuple

import numpy as np

from sam.command import run_command
from sam.simulate.engine import Cluster
from sam.simulate.lengths import NORMAL, LogNormal, Round
from sam.simulate.rollout import Choice, Drawn, simulate
from sam.simulate.setups import shipped_acceptance
from sam.switch.step_cost import linear

GRID = 512  # points at which distributions are evaluated
ROUTERS = (("oracle", 0), ("groups", 0), ("history", 0), ("context", 0), ("verl", 0))
STEP_MS = 10.0
FLAT = linear(STEP_MS, 0.0, 0.0)  # whatever runs
below = np.vectorize(NORMAL.cdf, otypes=[float])


class Figures(NamedTuple):
    """What rounds came to, float64 [rounds] each, by the steps that all slots busy would take.

    Attributes:
        steps: of the round.
        tails: steps in which fewer than half of the slots were busy; of the bound nothing is known.
    """

    steps: np.ndarray
    tails: np.ndarray | None = None

    @classmethod
    def of(cls, rounds: list[Round], finished: list[np.ndarray], slots: int) -> "Figures":
        """`finished`: for each round the steps after which each response was complete, float64 [requests].

        A slot is idle while responses wait only if another replica is full, so that with up to two replicas at least
        half are busy then: the tail begins when fewer responses are left than half of the slots.
        """
        least = np.array([one.num_tokens / slots for one in rounds])
        last = [np.sort(steps)[[-1, -((slots + 1) // 2)]] for steps in finished]
        ends, half = np.array(last).T / least
        return cls(ends, ends - half)


def least_idle_steps(lengths: LogNormal, common: float, slots: int) -> np.ndarray:
    """float64 [GRID]: h of a response of a prompt, for 0, cap / GRID, ... tokens that it has.

    Args:
        common: the prompt's part of the lengths, in standard deviations (LogNormal.draw).
    """
    mu = lengths.mu + lengths.sigma * np.sqrt(lengths.correlation) * common
    sigma = lengths.sigma * np.sqrt(1 - lengths.correlation)
    unit = lengths.cap / GRID
    longer = 1.0 - below((np.log(np.maximum(unit * np.arange(GRID), 1e-9)) - mu) / sigma)
    found = np.zeros(GRID)
    for have in range(GRID):
        share = 1.0 - longer[have:] / max(longer[have], 1e-300)
        found[have] = unit * (share - share**slots).sum()
    return found


def bound(lengths: LogNormal, prompts: int, samples: int, slots: int, seed: int) -> float:
    """Least mean steps of a round, of those drawn with `seed`, by the share of them that all slots busy would take."""
    work = lengths.draw(prompts, samples, seed=seed)
    least = [np.minimum.accumulate(least_idle_steps(lengths, c, slots)) for c in lengths.common_parts(prompts, seed)]
    last = np.minimum((work.lengths - 1) * GRID // lengths.cap, GRID - 1)
    each = np.array([least[prompt][i] for prompt, i in zip(work.prompts, last, strict=True)])
    return 1.0 + float(np.sort(each)[:slots].sum()) / work.num_tokens


def told(work: Round, common: np.ndarray, slots: int, blind: bool) -> np.ndarray:
    """float64 [requests]: the steps after which each response is complete, those of the longest prompts started first.

    Args:
        common: float64 [prompts], each prompt's part of the lengths.
        blind: whether the first to start, one in each slot, are the first samples of all prompts, then the second, ...
    """
    prompt, sample = work.prompts, np.arange(len(work)) % (len(work) // len(common))
    order = np.lexsort((sample, -common[prompt]))
    if blind:
        first = np.lexsort((prompt, sample))[:slots]
        order = np.concatenate([first, order[~np.isin(order, first)]])
    free, finished = [0.0] * slots, np.zeros(len(work))
    for request in order:
        finished[request] = free[0] + work.lengths[request]
        heapq.heapreplace(free, finished[request])
    return finished


def compare(
    lengths: LogNormal, prompts: int, samples: int, cluster: Cluster, seeds: int, chunks: list[int]
) -> dict[str, Figures]:
    """The figures of the bound and of every router, over the rounds of all seeds."""
    slots = cluster.replicas * cluster.max_num_seqs
    if prompts * samples < slots:
        raise ValueError(f"{prompts * samples} requests for {slots} slots: expected more, there is nothing to order")
    rounds = [lengths.draw(prompts, samples, seed=seed) for seed in range(seeds)]
    routers = [*ROUTERS, *((router, chunk) for router in ("groups", "context") for chunk in chunks)]
    found = {"bound": Figures(np.array([bound(lengths, prompts, samples, slots, seed) for seed in range(seeds)]))}
    common = [lengths.common_parts(prompts, seed) for seed in range(seeds)]
    for name, blind in (("told before", False), ("told once slots are full", True)):
        finished = [told(*one, slots, blind) for one in zip(rounds, common, strict=True)]
        found[name] = Figures.of(rounds, finished, slots)
    for router, chunk in routers:
        choice = Choice("never", k=3, scope="request", router=router, chunk=chunk)
        name = f"{router}, chunks of {chunk}" if chunk else router
        _, played = simulate(rounds, cluster, choice, FLAT, Drawn(partial(shipped_acceptance, "sam")), 1)
        found[name] = Figures.of(rounds, [one.finished_ms / STEP_MS for one in played], slots)
    return found


def table(found: dict[str, Figures]) -> str:
    """A line for each; speed and tail over verl's as the median of the rounds, and of all rounds together."""
    verl = found["verl"]
    lines = [
        f"{'':24} {'steps':>7} {'range':>15} {'over bound':>11} {'over oracle':>12} {'speed':>7} {'all':>6} "
        f"{'tail':>6} {'all':>6}   steps 1: all slots always busy; speed, tail: over verl's"
    ]
    for name, (steps, tails) in found.items():
        over = [f"{100 * (steps.mean() / found[other].steps.mean() - 1):+.1f} %" for other in ("bound", "oracle")]
        line = f"{name:24} {steps.mean():7.4f} {f'{steps.min():.3f}-{steps.max():.3f}':>15} {over[0]:>11} {over[1]:>12}"
        if tails is not None:
            line += f" {np.median(verl.steps / steps):6.2f}x {verl.steps.sum() / steps.sum():5.2f}x"
            share = tails / np.maximum(verl.tails, 1e-9)
            line += f" {np.median(share):5.2f}x {tails.sum() / max(1e-9, verl.tails.sum()):5.2f}x"
        lines.append(line)
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sam.simulate.reference.lower_bound", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--log-normal", nargs=4, type=float, default=[102, 512, 0.6, 0.35],
        metavar=("MEAN", "CAP", "SIGMA", "CORRELATION"), help="default 102 512 0.6 0.35")  # fmt: skip
    sizes = (("prompts", 12), ("samples", 16), ("replicas", 2), ("max-num-seqs", 12))
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=int, default=default, help=f"default {default}")
    parser.add_argument("--seeds", type=int, default=40, help="rounds (default 40)")
    parser.add_argument("--chunk", nargs="+", type=int, default=[16], help="tokens of a chunk (default 16)")
    options = parser.parse_args(arguments)
    if min(options.seeds, options.prompts, options.samples, *options.chunk) < 1:
        parser.error("--seeds, --prompts, --samples, --chunk: expected 1 or more")

    def shown() -> str:
        mean, cap, *shape = options.log_normal
        cluster = Cluster(options.replicas, options.max_num_seqs)
        sizes = options.prompts, options.samples, cluster, options.seeds, options.chunk
        return table(compare(LogNormal(mean, int(cap), *shape), *sizes))

    return run_command(shown)


if __name__ == "__main__":
    sys.exit(main())
