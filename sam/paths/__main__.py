"""`python -m sam.paths --acceptance RECORDINGS`: what verifying several paths would bring a rollout.

Verify steps with several paths are recorded while drafting on the recordings (sam.replay.paths), as an engine drafts
and for 1 to 16 samples that share a drafter, and drawn for the requests of a simulated rollout (sam.simulate). A
further path costs

- as rows: a row of its own in the batch, with the request's blocks of key-value cache shared (batch expansion): the
  last sampled token again, the tokens that it shares with an earlier path, and its own;
- as a tree: its own tokens alone, as if the engine verified trees, which no engine of this project's does: a bound.

A row's tokens cost what a draft token costs in the table of step costs, and rows are free where the table says so. The
policy is goodput: it adds a further path where that raises expected tokens per second. The probabilities of further
paths are scaled to how often they turned out right, which an engine would have to learn first. Gains are over the
same policy with one path.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Self

import numpy as np
from tqdm import tqdm

from sam.command import run_command
from sam.paths.drawn import ROWS, TREE, DrawnPaths, GoodputOfPaths, PathAcceptance, measure_paths
from sam.record.responses import join, read_recording
from sam.simulate import rollout as simulated
from sam.simulate.acceptance import SIBLINGS
from sam.simulate.engine import Assigned, Cluster, play
from sam.simulate.rollout import SETUPS, Outcome, assign, load_step_cost
from sam.simulate.workload import LogNormal
from sam.switch.step_cost import StepCost


@dataclass(frozen=True)
class Rollout:
    """A rollout to price paths on.

    Attributes:
        seeds: rounds of `prompts` x `samples` requests, played one after the other.
        tail: running requests from which the tail counts.
    """

    name: str
    cluster: Cluster
    cost: StepCost
    lengths: LogNormal
    prompts: int
    samples: int
    seeds: int
    tail: int

    @classmethod
    def published(cls, name: str, cautious: bool, seeds: int, replicas: int | None = None) -> Self:
        """A published set-up (sam.simulate.rollout), or `replicas` of its replicas with their share of the prompts.

        Step costs are fitted to published figures.
        """
        setup, cost = SETUPS[name], load_step_cost(name)
        count = min(replicas or setup.cluster.replicas, setup.cluster.replicas)
        prompts = -(-setup.prompts * count // setup.cluster.replicas)
        mean, spread = int(cost.fingerprint["mean_response_tokens"]), (simulated.SIGMA, simulated.CORRELATION)
        lengths = LogNormal(mean, simulated.CAP, *spread)
        if cautious:
            name += "_cautious"
            cost = load_step_cost(name)
        work = prompts, simulated.SAMPLES, seeds, setup.threshold
        return cls(name, replace(setup.cluster, replicas=count), cost, lengths, *work)

    def play(self, table: PathAcceptance, paths: int, k: int, costs: str, routing: str, progress) -> Outcome:
        """Play it with up to `paths` paths of `k` tokens."""
        played = []
        for seed in range(self.seeds):
            work, cluster = self.lengths.draw(self.prompts, self.samples, simulated.PROMPT_TOKENS, seed), self.cluster
            replica_of = assign(len(work), cluster.replicas, seed=seed)
            levels = table.level_of(siblings(work.prompts, replica_of, routing))
            drafting = [DrawnPaths(table, levels, costs, seed) for _ in range(cluster.replicas)]
            policies = [GoodputOfPaths(k, paths, self.cost, one) for one in drafting]
            played.append(play(work, cluster, Assigned(work, replica_of), self.cost, policies, drafting, progress))
        return simulated.summarize(played, self.tail)


def siblings(prompts: np.ndarray, replica_of: np.ndarray, routing: str) -> np.ndarray:
    """int64 [requests]: samples of its prompt, itself included, that each request's drafter sees."""
    places = prompts if routing == "shared" else prompts * (int(replica_of.max(initial=0)) + 1) + replica_of
    _, place, count = np.unique(places, return_inverse=True, return_counts=True)
    return count[place]


def price(rollouts: list[Rollout], options: argparse.Namespace) -> Iterator[dict]:
    """A row for each rollout, draft length, and number of paths and what they cost."""
    recording = join([read_recording(path) for path in options.acceptance])

    @cache
    def table(paths: int, k: int) -> PathAcceptance:
        total = recording.num_tokens * len(SIBLINGS)
        with tqdm(total=total, unit="tok", desc=f"{paths} paths, k {k}", mininterval=2.0, disable=None) as bar:
            return measure_paths(recording, paths, k, bar.update)

    runs = [(1, TREE), *((paths, costs) for paths in options.paths if paths > 1 for costs in (ROWS, TREE))]
    for rollout in rollouts:
        for k in options.k:
            with tqdm(unit="tok", desc=f"{rollout.name}, k {k}", mininterval=2.0, disable=None) as bar:
                for paths, costs in runs:
                    outcome = rollout.play(table(paths, k), paths, k, costs, options.routing, bar.update)
                    if paths == 1:
                        base = outcome
                    yield {
                        "rollout": rollout.name, "k": k, "paths": paths, "costs": costs if paths > 1 else "",
                        "saved_percent": round(100 * (1 - outcome.seconds / base.seconds), 2),
                        "tail_saved_percent": round(100 * (1 - outcome.tail_seconds / base.tail_seconds), 2),
                        **outcome.rounded(),
                    }  # fmt: skip


def paths_table(rows: list[dict]) -> str:
    """Lay out the rows as text."""
    lines = [
        "saved: share of the rollout's seconds, and of its tail's, that further paths save over one path",
        f"{'rollout':24} {'k':>2} {'paths':>6} {'as':>5} {'seconds':>9} {'saved %':>8} {'of the tail %':>13} "
        f"{'wasted':>9}",
    ]
    row = (
        "{rollout:24} {k:>2} {paths:>6} {costs:>5} {seconds:9.1f} {saved_percent:8.2f} {tail_saved_percent:13.2f} "
        "{wasted:>9}"
    )
    return "\n".join([*lines, *map(row.format_map, rows)])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sam.paths", description=__doc__.splitlines()[0])
    parser.add_argument("--acceptance", nargs="+", type=Path, required=True, help="recordings to draft on")
    parser.add_argument("--setup", nargs="*", choices=tuple(SETUPS), default=["qwen3_32b", "qwen3_235b"])
    parser.add_argument(
        "--replicas", type=int, help="of a set-up to play, with their share of the prompts (default: all)"
    )
    parser.add_argument("--cautious", action="store_true", help="set-ups with the dearer of their step costs, too")
    parser.add_argument("--step-cost", nargs="+", type=Path, default=[], help="tables of sam.profile, one replica each")
    parser.add_argument(
        "--log-normal", nargs=4, type=float, default=(300, 512, 0.6, 0.35), metavar=("MEAN", "CAP", "SIGMA", "CORR"),
        help="response lengths for --step-cost (default 300 512 0.6 0.35)",
    )  # fmt: skip
    parser.add_argument("--prompts", type=int, default=12, help="for --step-cost (default 12)")
    parser.add_argument("--samples", type=int, default=8, help="for --step-cost (default 8)")
    parser.add_argument("--seeds", type=int, default=2, help="rounds (default 2)")
    parser.add_argument("--paths", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--k", nargs="+", type=int, default=[3], help="draft tokens of a path (default 3)")
    parser.add_argument("--routing", choices=("least-loaded", "shared"), default="shared")
    parser.add_argument("--json", action="store_true", help="one JSON object per line instead of a table")
    options = parser.parse_args(arguments)
    for name in ("paths", "k"):
        if (least := min(getattr(options, name))) < 1:
            parser.error(f"--{name} {least}: expected 1 or more")

    if options.replicas is not None and options.replicas < 1:
        parser.error(f"--replicas {options.replicas}: expected 1 or more")

    def shown() -> str | Iterator[str]:
        forms = (False, True) if options.cautious else (False,)
        rollouts = [
            Rollout.published(name, form, options.seeds, options.replicas) for name in options.setup for form in forms
        ]
        mean, cap, sigma, correlation = options.log_normal
        lengths = LogNormal(mean, int(cap), sigma, correlation)
        work = lengths, options.prompts, options.samples, options.seeds, 8
        rollouts += [Rollout(path.stem, Cluster(), StepCost.load(path), *work) for path in options.step_cost]
        rows = list(price(rollouts, options))
        return map(json.dumps, rows) if options.json else paths_table(rows)

    return run_command(shown)


if __name__ == "__main__":
    sys.exit(main())
