"""`python -m sam.simulate`: simulates how long a rollout takes with and without speculation, event by event.

Requests come from a published set-up (`--setup`) or a log-normal fit (`--log-normal`), acceptance from verify steps of
a recording. Policies are those of sam.switch. All combinations of policies, draft lengths, thresholds, scopes, routers
and chunks are tried. Speed-ups are against no speculation with verl's router. `python -m sam.tune` plays a recorded
run; docs/bench.md says what is assumed.
"""

import argparse
import itertools
import json
import sys
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

from tqdm import tqdm

from sam.command import run_command
from sam.config import POLICIES
from sam.record.responses import join, read_recording
from sam.simulate import rollout
from sam.simulate.acceptance import measure, shipped_acceptance
from sam.simulate.engine import Cluster
from sam.simulate.rollout import ROUTERS, SCOPES, SETUPS, Choice
from sam.simulate.workload import LogNormal

ROW = (
    "{label:22} {scope:>7} {router:>7} {chunk:>6} {delay:>6} {seconds:9.1f} {tail_seconds:8.1f} "
    "{speedup:8.3f} {tail_speedup:6.3f} {switched_on:5.2f} {accept_length:7.3f} {wasted:>10}"
)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(prog="python -m sam.simulate", description=__doc__.splitlines()[0])
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


def run(options: argparse.Namespace) -> dict:
    """Simulate a choice without speculation and then all choices; returns the report that `--json` prints."""
    setup = SETUPS[options.setup] if options.setup else rollout.SetUp(Cluster(), 96, Choice.k, Choice.threshold)
    if not (named := options.step_cost or options.setup):
        raise ValueError(f"--step-cost is missing: a file, or one of {', '.join(SETUPS)}")
    cost = rollout.load_step_cost(named)
    if options.setup:
        mean = rollout.load_step_cost(options.setup).fingerprint["mean_response_tokens"]
        lengths = LogNormal(int(mean), rollout.CAP, rollout.SIGMA, rollout.CORRELATION)
    else:
        mean, cap, sigma, correlation = options.log_normal
        lengths = LogNormal(mean, int(cap), sigma, correlation)
    asked = {"replicas": options.replicas, "max_num_seqs": options.max_num_seqs, "dp_synchronous": options.lock_step}
    cluster = replace(setup.cluster, **{name: value for name, value in asked.items() if value is not None})
    work = lengths.draw(options.prompts or setup.prompts, options.samples, rollout.PROMPT_TOKENS)
    options.k, options.threshold = options.k or [setup.k], options.threshold or [setup.threshold]
    tail = options.threshold[0] if len(options.threshold) == 1 else setup.threshold
    choices = [Choice("never", options.k[0], scope="request"), *grid(options)]
    report = {
        "scenario": options.setup or "log-normal", "requests": len(work), "tokens": work.num_tokens,
        "replicas": cluster.replicas, "lock_step": cluster.dp_synchronous, "max_num_seqs": cluster.max_num_seqs,
        "step_cost": cost.source, "tail_threshold": tail, "rows": [],
    }  # fmt: skip
    drafts, base = rollout.drawn(acceptance(options)), None
    with tqdm(total=work.num_tokens * len(choices), unit="tok", mininterval=2.0, disable=None) as bar:
        for choice in choices:
            played = rollout.simulate([work], cluster, choice, cost, drafts, bar.update)
            outcome = rollout.summarize(played, tail)
            base = base or outcome
            gain, in_tail = (
                round(base[name] / outcome[name], 4) if outcome[name] else 1.0 for name in ("seconds", "tail_seconds")
            )
            row = {"label": choice.label, **asdict(choice), "speedup": gain, "tail_speedup": in_tail}
            report["rows"].append(row | outcome)
    return report


def acceptance(options: argparse.Namespace):
    """Return what gives the table of a draft length: one measured on recordings, or a shipped one."""
    if not options.acceptance:
        return shipped_acceptance
    recording = join([read_recording(path) for path in options.acceptance])
    return cache(lambda k: measure(recording, k))


def table(report: dict) -> str:
    """Lay out a report as text, one line for each choice."""
    lines = [
        f"{report['requests']} requests, {report['tokens']} tokens, {report['replicas']} replicas"
        f"{' in lock-step' if report['lock_step'] else ''}, tail from {report['tail_threshold']} running requests",
        f"step costs: {report['step_cost']}",
        f"{'policy':22} {'scope':>7} {'router':>7} {'chunk':>6} {'delay':>6} {'seconds':>9} "
        f"{'tail s':>8} {'speed-up':>8} {'tail':>6} {'on':>5} {'length':>7} {'wasted':>10}",
    ]
    return "\n".join([*lines, *map(ROW.format_map, report["rows"])])


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    show = json.dumps if options.json else table
    return run_command(lambda: show(run(options)))


if __name__ == "__main__":
    sys.exit(main())
