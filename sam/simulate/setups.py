"""`sam tune --setup NAME`: simulates how long a rollout takes with and without speculation, event by event.

Requests come from a published set-up (`--setup`) or a log-normal fit (`--log-normal`), acceptance from verify steps of
a recording. Policies are those of sam.switch. All combinations of policies, draft lengths, thresholds, scopes, routers
and chunks are tried. Speed-ups are against no speculation with verl's router. `sam tune RUN_DIR` plays a recorded
run; docs/bench.md says what is assumed.
"""

import argparse
import itertools
import json
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path

from tqdm import tqdm

from sam.command import Parser, run_command
from sam.config import POLICIES
from sam.record.responses import join, read_recording
from sam.simulate import rollout
from sam.simulate.acceptance import measure, shipped_acceptance
from sam.simulate.rollout import ROUTERS, SCOPES, SETUPS, Choice, Cluster
from sam.simulate.workload import log_normal

# Columns of the table, and how they are laid out.
COLUMNS = {
    "label": "22", "scope": ">7", "router": ">7", "chunk": ">6", "delay": ">6", "seconds": ">9.1f", "speedup": ">8.3f",
    "switched_on": ">11.2f", "accept_length": ">13.3f", "wasted": ">10",
}  # fmt: skip


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = Parser(prog="sam tune", description=__doc__.splitlines()[0])
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


def table(report: dict) -> str:
    """Lay out a report as text, one line for each choice."""
    lock_step = " in lock-step" if report["lock_step"] else ""
    return "\n".join([
        f"{report['requests']} requests, {report['tokens']} tokens, {report['replicas']} replicas{lock_step}",
        f"step costs: {report['step_cost']}",
        " ".join(f"{name:{layout.split('.')[0]}}" for name, layout in COLUMNS.items()),
        *(" ".join(f"{row[name]:{layout}}" for name, layout in COLUMNS.items()) for row in report["rows"]),
    ])  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    show = json.dumps if options.json else table
    return run_command(lambda: show(run(options)))
