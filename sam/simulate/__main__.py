"""`python -m sam.simulate`: simulates how long a rollout takes with and without speculation, event by event.

Requests come from a published set-up (`--setup`), a log-normal fit (`--log-normal`), a recording or a dump of verl's
(`--traces`), or a recorded training run (`--run`, beside its measured seconds). Acceptance comes from drafting on the
responses themselves for recordings and runs, otherwise from the verify steps of another recording. Policies are those
of sam.switch. All combinations of policies, draft lengths, thresholds, scopes and routings are tried.

Speed-ups are against no speculation with least-loaded routing. docs/bench.md says what is assumed.
"""

import argparse
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from sam.command import run_command
from sam.config import POLICIES
from sam.replay.baselines import NAMES
from sam.simulate import scenario as scenarios
from sam.simulate.rollout import Choice
from sam.simulate.routing import ROUTERS, ROUTINGS
from sam.simulate.run import RecordedRun
from sam.simulate.scenario import Scenario
from sam.simulate.setups import SETUPS
from sam.simulate.validate import table as validation_table
from sam.simulate.validate import validate

TRIED = ("threshold", "goodput")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(prog="python -m sam.simulate", description=__doc__.splitlines()[0])
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--setup", choices=tuple(SETUPS), help="published set-up, its step costs FITTED")
    source.add_argument("--log-normal", nargs=4, type=float, metavar=("MEAN", "CAP", "SIGMA", "CORRELATION"))
    source.add_argument("--traces", nargs="+", type=Path, help=".npz recordings or .jsonl dumps, as one round")
    source.add_argument(
        "--run", nargs="+", type=Path, help="run directories of one machine; measured against simulated"
    )
    parser.add_argument(
        "--step-cost", help="table: a file, or the name of a shipped one; of runs: fitted to their steps"
    )
    parser.add_argument("--cost-from", nargs="+", type=Path, help="runs to fit step costs to (default: those of --run)")
    parser.add_argument("--acceptance", nargs="+", type=Path, help="recordings to draft on, or a table made of them")
    parser.add_argument("--drafter", choices=NAMES, help="default: sam; of runs: their own")
    parser.add_argument("--tokenizer", help="for dumps of text: folder or name of the tokenizer")
    parser.add_argument("--prompts", type=int, help="of a drawn round")
    parser.add_argument("--samples", type=int, help="of each prompt, of a drawn round")
    parser.add_argument("--seeds", type=int, default=1, help="drawn rounds, played one after the other (default 1)")
    parser.add_argument("--replicas", type=int)
    parser.add_argument("--max-num-seqs", type=int, help="requests that run at once on a replica")
    parser.add_argument("--lock-step", action=argparse.BooleanOptionalAction, help="replicas wait for each other")
    parser.add_argument("--policy", nargs="+", choices=POLICIES, help=f"default: {' '.join(TRIED)}; of runs: none")
    parser.add_argument("--k", nargs="+", type=int, help="draft tokens")
    parser.add_argument("--threshold", nargs="+", type=int, help="running requests, of the threshold policy")
    parser.add_argument("--hysteresis", type=int, default=0)
    parser.add_argument("--scope", nargs="+", choices=("request", "group"))
    parser.add_argument("--routing", nargs="+", choices=ROUTINGS)
    parser.add_argument("--router", nargs="+", choices=ROUTERS, help="who decides where requests run (default: verl)")
    parser.add_argument("--chunk", nargs="+", type=int, help="tokens of a chunk, not of verl's router; 0: no chunks")
    parser.add_argument("--kv-tokens", type=int, help="tokens that a replica's KV cache holds; 0: no bound")
    parser.add_argument("--read-ms", type=float, help="milliseconds that reading 1000 tokens of context takes")
    parser.add_argument(
        "--tail", type=int, help="running requests from which the tail counts (default: the only threshold)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    options = parser.parse_args(arguments)
    options.drafter_given, options.drafter = options.drafter, options.drafter or "sam"
    for name in ("seeds", "prompts", "samples"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name} {value}: expected 1 or more")
    if (least := min(options.chunk or [0])) < 0:
        parser.error(f"--chunk {least}: expected tokens, or 0 for no chunks")
    return options


def grid(options: argparse.Namespace, default: Choice) -> list[Choice]:
    """All combinations to try; thresholds are tried with the threshold policy only."""
    policies = options.policy or ([] if options.run else TRIED)
    ks, thresholds = options.k or [default.k], options.threshold or [default.threshold]
    choices, routers = [], list(itertools.product(options.router or ["verl"], options.chunk or [0]))
    routers = list(dict.fromkeys((router, 0 if router == "verl" else chunk) for router, chunk in routers))
    # The other baselines see their own request only.
    seen = "group" if options.drafter in ("sam", "suffix", "suffix-any") else "request"
    scopes = options.scope or [default.scope if options.run and not options.drafter_given else seen]
    for policy, k, routing, scope in itertools.product(policies, ks, options.routing or ["least-loaded"], scopes):
        for threshold in thresholds if policy == "threshold" else thresholds[:1]:
            one = Choice(policy, k, threshold, options.hysteresis, scope, routing)
            choices += [replace(one, router=router, chunk=chunk) for router, chunk in routers]
    return list(dict.fromkeys(replace(c, k=ks[0], scope="request") if c.policy == "never" else c for c in choices))


def sweep(scenario: Scenario, choices: list[Choice], tail: int) -> list[dict]:
    """Play every choice, after one without speculation; returns a row for each."""
    without = Choice("never", choices[0].k, scope="request")
    total = scenario.num_tokens * (1 + len(choices))
    rows, base = [], None
    with tqdm(total=total, unit="tok", desc=scenario.name, mininterval=2.0, disable=None) as bar:
        for choice in [without, *choices]:
            outcome, _ = scenario.play(choice, tail, bar.update)
            base = base or outcome
            rows.append({
                "label": choice.label, "policy": choice.policy, "k": choice.k, "threshold": choice.threshold,
                "scope": choice.scope, "routing": choice.routing, "router": choice.router, "chunk": choice.chunk,
                "speedup": round(base.seconds / outcome.seconds, 4),
                "tail_speedup": round(base.tail_seconds / outcome.tail_seconds, 4) if outcome.tail_seconds else 1.0,
                **outcome.rounded(),
            })  # fmt: skip
    return rows


def table(report: dict) -> str:
    """Lay out a report as text, one line for each choice."""
    lines = [
        f"{report['requests']} requests, {report['tokens']} tokens, {report['replicas']} replicas"
        f"{' in lock-step' if report['lock_step'] else ''}, tail from {report['tail_threshold']} running requests",
        f"step costs: {report['step_cost']}",
        f"{'policy':22} {'scope':>7} {'routing':>12} {'router':>7} {'chunk':>6} {'seconds':>9} "
        f"{'tail s':>8} {'speed-up':>8} {'tail':>6} {'on':>5} {'length':>7} {'wasted':>10} {'preempted':>9} "
        f"{'moves':>7}",
    ]
    row = (
        "{label:22} {scope:>7} {routing:>12} {router:>7} {chunk:>6} {seconds:9.1f} {tail_seconds:8.1f} "
        "{speedup:8.3f} {tail_speedup:6.3f} {switched_on:5.2f} {accept_length:7.3f} {wasted:>10} {preempted:>9} "
        "{moves:>7}"
    )
    return "\n".join([*lines, *map(row.format_map, report["rows"])])


def run(options: argparse.Namespace) -> tuple[dict, str]:
    """Simulate; returns the report and the text to show."""
    validation, shown = [], []
    if options.run:
        runs = [RecordedRun.load(path) for path in options.run]
        parts = scenarios.recorded_run(options, runs)
        validation = validate(runs, parts)
        shown.append(validation_table(validation))
        scenario = parts[0]
    else:
        made = {"setup": scenarios.published, "log_normal": scenarios.log_normal, "traces": scenarios.recorded}
        scenario = next(make for name, make in made.items() if getattr(options, name))(options)
    report = {
        "scenario": scenario.name, "requests": sum(map(len, scenario.rounds)), "tokens": scenario.num_tokens,
        "replicas": scenario.cluster.replicas, "lock_step": scenario.cluster.dp_synchronous,
        "max_num_seqs": scenario.cluster.max_num_seqs, "step_cost": scenario.cost.source, "drafter": options.drafter,
        "runs": validation, "rows": [],
    }  # fmt: skip
    choices = grid(options, scenario.choice)
    only = options.threshold[0] if options.threshold and len(options.threshold) == 1 else scenario.choice.threshold
    report["tail_threshold"] = tail = options.tail or only
    if choices:
        report["rows"] = sweep(scenario, choices, tail)
        shown.append(table(report))
    return report, "\n".join(shown)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)

    def shown() -> str:
        report, shown = run(options)
        return json.dumps(report) if options.json else shown

    return run_command(shown)


if __name__ == "__main__":
    sys.exit(main())
