"""`sam tune RUN_DIR`: recommends policy, k, threshold, router and chunk from a recorded run.

Step costs are fitted to the run's engine steps (better: to those of a run with speculation and one without, which
`--cost-from` adds). Its rollouts are then simulated with every candidate, drafting on its responses (sam.simulate), and
with the best of them also under the recipe's router and every chunk. The gain's interval is a bootstrap over training
steps, widened by the error of the simulation in a training step.

`sam tune --setup NAME`, or `--log-normal`, simulates how long a rollout takes of which there is no run.

Its requests are drawn, and its acceptance comes from verify steps of a recording. All combinations of policies, draft
lengths, thresholds, scopes, routers and chunks are tried; speed-ups are against no speculation with verl's router.
docs/bench.md says what is assumed.
"""

import argparse
import itertools
import json
import sys
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from sam.command import Parser, run_command
from sam.config import POLICIES
from sam.record.responses import join, read_recording
from sam.replay import make_drafter
from sam.simulate import rollout
from sam.simulate.rollout import ROUTERS, SCOPES, SETUPS, Choice, Cluster
from sam.simulate.run import FittedCost, RecordedRun, fit_runs
from sam.simulate.workload import log_normal, measure, shipped_acceptance

DRAFT_LENGTHS, THRESHOLDS = (2, 3, 4, 6, 8), (4, 8, 16, 32, 64, 128, 256)
SET_UP = ("--setup", "--log-normal")  # what a simulation without a run begins with
CHUNKS = (0, 64, 512, 2048, 8192)  # tokens; 0: whole responses
TOKENS = 1_000_000  # of responses to simulate with every candidate, if that leaves two training steps
RESAMPLES, INTERVAL = 4000, (5, 95)
AS_FAST = 0.01  # candidates within this share of the fastest count as equally fast
# Columns of a set-up's table, and how they are laid out.
COLUMNS = {
    "label": "22", "scope": ">7", "router": ">7", "chunk": ">6", "delay": ">6", "seconds": ">9.1f", "speedup": ">8.3f",
    "switched_on": ">11.2f", "accept_length": ">13.3f", "wasted": ">10",
}  # fmt: skip


class Trial(NamedTuple):
    """A candidate, its seconds in each training step (float64 [n]), and the draft tokens it wasted in all of them."""

    choice: Choice
    seconds: np.ndarray
    wasted: int
    accept_length: float


def candidates(run: RecordedRun, most_running: int, ks: list[int], thresholds: list[int]) -> list[Choice]:
    """All combinations to try; of the thresholds at or above the most running requests only the smallest."""
    reached = [threshold for threshold in thresholds if threshold < most_running]
    reached += [threshold for threshold in thresholds if threshold >= most_running][:1]
    switched = [replace(run.choice, policy="threshold", k=k, threshold=t) for k in ks for t in reached]
    return switched + [replace(run.choice, policy="goodput", k=k) for k in ks if k >= min(4, max(ks))]


def choose_steps(run: RecordedRun, count: int | None) -> RecordedRun:
    """The run with `count` of its training steps, evenly spread; None: enough steps for TOKENS tokens."""
    steps = list(run.seconds)
    if count is None:
        count = max(2, TOKENS // max(1, sum(work.num_tokens for work, _ in run.rounds(steps[0]))))
    kept = np.unique(np.linspace(0, len(steps) - 1, min(count, len(steps))).round().astype(int))
    return replace(run, seconds={steps[i]: run.seconds[steps[i]] for i in kept})


def play(
    run: RecordedRun, choices: list[Choice], fitted: FittedCost, idle_ms: float, drafter: str | None = "sam"
) -> list[Trial]:
    """Simulate a run's rollouts, of which `idle_ms` a round are in no engine step, with each of `choices`, drafting on
    its own responses. `drafter`: one of sam.replay.NAMES; None: the run's own."""
    pairs = [(work, step) for step in run.seconds for work, _ in run.rounds(step)]
    rounds, of_step = [work for work, _ in pairs], np.array([step for _, step in pairs])
    own = "sam" if run.speculation.method == "off" else run.speculation.method
    drafts, cluster = rollout.real(partial(make_drafter, drafter or own)), run.cluster(fitted.admit_ms)
    trials, total = [], sum(work.num_tokens for work in rounds) * len(choices)
    with tqdm(total=total, unit="tok", desc="candidates", mininterval=2.0, disable=None) as bar:
        for choice in choices:
            played = rollout.simulate(rounds, cluster, choice, fitted.cost, drafts, bar.update)
            seconds = np.array([rollout.seconds(one) + idle_ms / 1e3 for one in played])
            by_step = np.array([seconds[of_step == step].sum() for step in run.seconds])
            outcome = rollout.summarize(played)
            trials.append(Trial(choice, by_step, outcome["wasted"], outcome["accept_length"]))
    return trials


def gains(without: np.ndarray, with_: np.ndarray, error: float) -> tuple[float, float, float]:
    """Speed-up, and the ends of its interval over resampled training steps, of which seconds are given (float [n]).

    `error`: standard deviation of the logarithm of simulated over measured seconds.
    """
    chance = np.random.default_rng(0)
    rows = chance.integers(len(without), size=(RESAMPLES, len(without)))
    ratios = without[rows].sum(axis=1) / with_[rows].sum(axis=1)
    low, high = np.percentile(ratios * np.exp(error * chance.standard_normal(RESAMPLES)), INTERVAL)
    return float(without.sum() / with_.sum()), float(low), float(high)


def best(trials: list[Trial]) -> Trial:
    """The fastest; of those about as fast, one with verl's router that wastes the fewest draft tokens."""
    enough = (1 + AS_FAST) * min(trial.seconds.sum() for trial in trials)
    fast = (trial for trial in trials if trial.seconds.sum() <= enough)
    return min(fast, key=lambda trial: (trial.choice.router != "verl", trial.wasted))


def override(choice: Choice) -> str:
    """Write a candidate as overrides for the command line of the recipe."""
    words = ["speculation=sam", f"speculation.policy={choice.policy}", f"speculation.num_speculative_tokens={choice.k}"]
    if choice.policy == "threshold":
        words.append(f"speculation.batch_size_threshold={choice.threshold}")
    if choice.router != "verl":
        words += [f"routing={choice.router}", f"routing.chunk_tokens={choice.chunk or 'null'}"]
    return " ".join(words)


def tune(options: argparse.Namespace) -> dict:
    """Find the best candidate for a run; returns the report that `--json` prints."""
    whole, others = RecordedRun.load(options.run), [RecordedRun.load(other) for other in options.cost_from]
    run = choose_steps(whole, options.steps)
    fitted, idle_ms = fit_runs([whole, *others])
    rounds = [one for step in run.seconds for one in run.rounds(step)]
    most = max(int(steps.running.max()) for _, steps in rounds)
    choices = [replace(run.choice, policy="never"), *candidates(run, most, options.k, options.threshold)]
    without, *trials = play(run, choices, fitted, idle_ms)
    # A chunk as long as the longest response is none.
    longest, fastest = max(int(work.lengths.max()) for work, _ in rounds), best(trials).choice
    routed = [replace(fastest, router="context", chunk=chunk) for chunk in options.chunk if chunk < longest]
    trials += play(run, routed, fitted, idle_ms)
    chosen = best(trials)
    checked = [run, *(choose_steps(other, options.steps) for other in others if other.is_simulated)]
    measured = [np.array(list(one.seconds.values())) for one in checked]
    simulated = [play(one, [one.choice], fitted, idle_ms, None)[0].seconds for one in checked]
    error = float(np.sqrt(np.mean(np.log(np.concatenate(simulated) / np.concatenate(measured)) ** 2)))
    gain, low, high = gains(without.seconds, chosen.seconds, error)
    pays, choice = low > 1.0, chosen.choice
    return {
        "run": str(options.run), "training_steps": list(run.seconds), "measured_seconds": round(measured[0].sum(), 3),
        "simulated_seconds": round(simulated[0].sum(), 3),
        "simulated_error": round(simulated[0].sum() / measured[0].sum() - 1, 4), "error_of_a_step": round(error, 4),
        "step_cost": fitted.cost.source, "drafts_seen": fitted.drafts_seen, "plain_steps_from": fitted.plain_from,
        "recommended": {
            "policy": choice.policy, "num_speculative_tokens": choice.k,
            "batch_size_threshold": choice.threshold if choice.policy == "threshold" else None,
            "router": choice.router, "chunk_tokens": choice.chunk or None,
            "speedup": round(gain, 4), "interval": [round(low, 4), round(high, 4)], "pays": pays,
            "override": override(choice) if pays else "speculation=off",
        },
        "candidates": [
            {"policy": trial.choice.label, "router": trial.choice.router, "chunk": trial.choice.chunk,
             "speedup": round(float(without.seconds.sum() / trial.seconds.sum()), 4),
             "accept_length": round(trial.accept_length, 3), "wasted": trial.wasted}
            for trial in sorted(trials, key=lambda trial: float(trial.seconds.sum()))
        ],
    }  # fmt: skip


def text(result: dict, shown: int = 8) -> str:
    """Lay out a report as text, with the `shown` fastest candidates."""
    row = (
        "{policy:20} {router:>7} {chunk:>5} speed-up {speedup:.3f}, acceptance length "
        "{accept_length:.2f}, {wasted} draft tokens wasted"
    )
    chosen, steps = result["recommended"], len(result["training_steps"])
    cautions = {
        "the router's messages and its CPU are not simulated: measure it before you keep it":
            chosen["pays"] and chosen["router"] != "verl",
        "no draft was ever verified: what that costs is a guess; add a run with drafts with --cost-from":
            not result["drafts_seen"],
        f"no steps without drafts of under {result['plain_steps_from']} requests: what they take is a guess; add a run "
        "without speculation with --cost-from": result["plain_steps_from"] > 4,
        "fewer than five training steps: the interval is too narrow to be trusted": steps < 5,
        "speculation does not pay for certain here": not chosen["pays"],
    }  # fmt: skip
    return "\n".join([
        *map(row.format_map, result["candidates"][:shown]),
        f"step costs: {result['step_cost']}",
        f"the run itself: {result['measured_seconds']:.1f} s measured, {result['simulated_seconds']:.1f} s simulated "
        f"({result['simulated_error']:+.1%}), {steps} training steps",
        "expected of the rollout: {:.2f}x ({:.2f} to {:.2f} in nine of ten resamplings), against "
        "speculation=off".format(chosen["speedup"], *chosen["interval"]),
        *(line for line, is_said in cautions.items() if is_said),
        "",
        chosen["override"],
    ])  # fmt: skip


def parse_setup(arguments: list[str]) -> argparse.Namespace:
    """Parse and check the command line of a set-up."""
    parser = Parser(prog="sam tune", description="How long a set-up's rollout takes under several settings.")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--setup", choices=tuple(SETUPS), help="published set-up, its step costs FITTED")
    source.add_argument("--log-normal", nargs=4, type=float, metavar=("MEAN", "CAP", "SIGMA", "CORRELATION"))
    parser.add_argument("--step-cost", help="table: a file, or the name of a shipped one")
    parser.add_argument("--acceptance", nargs="+", type=Path, help="recordings to draft on")
    parser.add_argument("--prompts", type=int, help="of a round")
    parser.add_argument("--samples", type=int, default=rollout.SAMPLES, help="of each prompt")
    parser.add_argument("--replicas", type=int)
    parser.add_argument("--max-num-seqs", type=int, help="requests that run at once on a replica")
    parser.add_argument("--lock-step", action=argparse.BooleanOptionalAction, help="replicas wait for each other")
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=["threshold", "goodput"])
    parser.add_argument("--k", nargs="+", type=int, help="draft tokens")
    parser.add_argument("--threshold", nargs="+", type=int, help="running requests, of the threshold policy")
    parser.add_argument("--scope", nargs="+", choices=SCOPES, default=["group"], help="whose text a drafter sees")
    parser.add_argument("--router", nargs="+", choices=ROUTERS, default=["verl"], help="who decides where requests run")
    parser.add_argument("--chunk", nargs="+", type=int, default=[0], help="tokens, not of verl's router; 0: no chunks")
    parser.add_argument("--delay", type=int, default=0, help="tokens by which shared text is late (default 0)")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args(arguments)
    for name, least in {"prompts": 1, "samples": 1, "k": 1, "threshold": 0, "chunk": 0, "delay": 0}.items():
        given = getattr(options, name)
        if given is not None and (lowest := min(given if isinstance(given, list) else [given])) < least:
            parser.error(f"--{name} {lowest}: expected {least} or more")
    return options


def grid(options: argparse.Namespace) -> list[Choice]:
    """All combinations to try; thresholds are tried with the threshold policy only, chunks with the recipe's router."""
    axes = options.policy, options.k, options.scope, options.router, options.chunk, options.threshold
    choices = []
    for policy, k, scope, router, chunk, threshold in itertools.product(*axes):
        delay = options.delay if scope == "shared" else 0
        one = Choice(policy, k, threshold, scope, router, chunk if router != "verl" else 0, delay)
        one = one if policy == "threshold" else replace(one, threshold=options.threshold[0])
        choices.append(replace(one, k=options.k[0], scope="request") if policy == "never" else one)
    return list(dict.fromkeys(choices))


def play_setup(options: argparse.Namespace) -> dict:
    """Simulate a choice without speculation and then all choices; returns the report that `--json` prints."""
    if not (named := options.step_cost or options.setup):
        raise ValueError(f"--step-cost is missing: a file, or one of {', '.join(SETUPS)}")
    cost, own = rollout.load_step_cost(named), (Cluster(), 96, Choice.k, Choice.threshold)
    cluster, prompts, k, threshold = SETUPS.get(options.setup, own)
    lengths = options.log_normal
    if options.setup:
        mean = rollout.load_step_cost(options.setup).fingerprint["mean_response_tokens"]
        lengths = int(mean), rollout.CAP, rollout.SIGMA, rollout.CORRELATION
    asked = {"replicas": options.replicas, "max_num_seqs": options.max_num_seqs, "dp_synchronous": options.lock_step}
    cluster = replace(cluster, **{name: value for name, value in asked.items() if value is not None})
    work = log_normal(*lengths, (options.prompts or prompts, options.samples))
    options.k, options.threshold = options.k or [k], options.threshold or [threshold]
    choices = [Choice("never", options.k[0], scope="request"), *grid(options)]
    report = {
        "scenario": options.setup or "log-normal", "requests": len(work), "tokens": work.num_tokens,
        "replicas": cluster.replicas, "lock_step": cluster.dp_synchronous, "max_num_seqs": cluster.max_num_seqs,
        "step_cost": cost.source, "rows": [],
    }  # fmt: skip
    table_of, base = shipped_acceptance, None  # of a draft length
    if options.acceptance:
        recording = join([read_recording(path) for path in options.acceptance])
        table_of = cache(lambda k: measure(recording, k))
    drafts = rollout.drawn(table_of)
    with tqdm(total=work.num_tokens * len(choices), unit="tok", mininterval=2.0, disable=None) as bar:
        for choice in choices:
            outcome = rollout.summarize(rollout.simulate([work], cluster, choice, cost, drafts, bar.update))
            base = base or outcome["seconds"]
            speedup = round(base / outcome["seconds"], 4)
            report["rows"].append({"label": choice.label, **asdict(choice), "speedup": speedup, **outcome})
    return report


def setup_table(report: dict) -> str:
    """Lay out a report as text, one line for each choice."""
    lock_step = " in lock-step" if report["lock_step"] else ""
    return "\n".join([
        f"{report['requests']} requests, {report['tokens']} tokens, {report['replicas']} replicas{lock_step}",
        f"step costs: {report['step_cost']}",
        " ".join(f"{name:{layout.split('.')[0]}}" for name, layout in COLUMNS.items()),
        *(" ".join(f"{row[name]:{layout}}" for name, layout in COLUMNS.items()) for row in report["rows"]),
    ])  # fmt: skip


def main(arguments: list[str]) -> int:
    if any(word.partition("=")[0] in SET_UP for word in arguments):
        of_setup = parse_setup(arguments)
        return run_command(lambda: (json.dumps if of_setup.json else setup_table)(play_setup(of_setup)))
    epilog = "`sam tune --setup NAME`, or --log-normal, simulates a set-up under several settings: with --help more"
    parser = Parser(prog="sam tune", description=__doc__.splitlines()[0], epilog=epilog)
    parser.add_argument("run", type=Path, help="run directory of sam_recipe.main_dapo")
    parser.add_argument("--k", nargs="+", type=int, default=DRAFT_LENGTHS, help="draft lengths to try")
    parser.add_argument("--threshold", nargs="+", type=int, default=THRESHOLDS, help="thresholds to try")
    parser.add_argument("--chunk", nargs="+", type=int, default=CHUNKS, help="tokens of a chunk to try with the "
        "recipe's router; 0: whole responses")  # fmt: skip
    parser.add_argument("--steps", type=int, help=f"training steps to play (default: enough for {TOKENS} tokens)")
    parser.add_argument("--cost-from", nargs="+", type=Path, default=[], help="more runs to fit step costs to")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(arguments)
    counts = [*options.k, *([] if options.steps is None else [options.steps])]
    if min(counts) < 1 or min([*options.threshold, *options.chunk]) < 0:
        parser.error("--k and --steps: expected 1 or more; --threshold and --chunk: 0 or more")
    show = json.dumps if options.json else text
    return run_command(lambda: show(tune(options)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
