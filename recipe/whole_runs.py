"""`python -m recipe.whole_runs`: compares settings in whole training runs of verl that take turns, round by round.

For policies, methods, sharing, routers, numbers of replicas. Each round has one run of every variant, another one first
in each; a variant's seconds are compared with the first one's of the same round. Sampling is exact: all runs must
generate the same tokens, which is checked.
"""

import argparse
import itertools
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from recipe.record.run_directory import STATE_FILE, read_json
from recipe.report.runs import ReportError, Run, compare_responses
from sam.bench.result import compared, times
from sam.bench.rounds import turns
from sam.command import run_command


def measure(options: argparse.Namespace) -> list[list[Run]]:
    """Train each variant once a round, but for runs that are finished; returns the runs by round and variant.

    Raises:
        ReportError: a run failed, has other steps or responses than the first one, or has not recorded them.
    """
    output, names = options.output.absolute(), [f"variant_{n}" for n in range(1, len(options.variants) + 1)]
    rounds = range(1, options.rounds + 1)
    order = [(output / f"round_{round_}" / name, name) for round_ in rounds for name in turns(names, round_)]
    for directory, name in tqdm(order, unit="run", disable=None):
        if read_json(directory / STATE_FILE).get("phase") == "finished":
            continue
        command = [
            *(sys.executable, "-m", "recipe.main_dapo", "--config-name", options.config_name, f"run_dir={directory}"),
            *(f"trainer.experiment_name={output.name}_{directory.parent.name}_{name}", "trainer.save_freq=-1"),
            *("trainer.val_before_train=false", "trainer.test_freq=-1"),
            *(*shlex.split(options.variants[names.index(name)]), *options.overrides),
        ]
        if code := subprocess.run(command).returncode:
            raise ReportError(f"{directory}: the run ended with exit code {code}, see {directory}/train.log")
    runs = [[Run.load(output / f"round_{round_}" / name) for name in names] for round_ in rounds]
    first = runs[0][0]
    for run in itertools.chain(*runs):
        same = compare_responses(run, first)
        wrong = [step for step in first.steps if not (counts := same.get(step)) or counts[0] < max(1, counts[1])]
        if run.steps != first.steps or wrong:
            raise ReportError(f"{run.source}: other steps or responses than {first.source}, first {wrong[:1]}")
    return runs


def table(runs: list[list[Run]], variants: list[str]) -> list[dict]:
    """For each variant its rollouts' seconds by round, what sam.bench has of these `compared` with the first variant's
    in the same round, and the mean acceptance length by round."""
    rows: list[dict] = []
    for variant, *own in zip(variants, *runs, strict=True):
        seconds, lengths = [run.seconds(run.steps) for run in own], [run.acceptance()[0] for run in own]
        against = compared(seconds, rows[0]["seconds"] if rows else seconds)
        rows.append({"variant": variant, "seconds": seconds, **against, "acceptance_length": lengths})
    return rows


def as_text(rows: list[dict]) -> Iterator[str]:
    """Lay out `table`'s rows: medians, and the range of the rounds."""
    for row in rows:
        of, lengths = row["seconds"], [length for length in row["acceptance_length"] if length is not None]
        yield row["variant"]
        yield f"  rollout seconds of a run: {np.median(of):.2f} ({min(of):.2f} to {max(of):.2f})"
        yield f"  over the first variant: {times(row)}, {len(of)} rounds: {row['answer']}"
        if lengths:
            yield f"  mean acceptance length: {np.median(lengths):.2f}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipe.whole_runs", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("outputs/whole_runs"), help="its finished runs are kept")
    parser.add_argument("--config-name", default="dapo_tiny_cpu", help="a file of configs/ without .yaml")
    parser.add_argument(
        "--variants", nargs="+", required=True, help="overrides of each, in quotes; the first is the peer"
    )
    parser.add_argument("--rounds", type=int, default=5, help="runs of each variant (default 5)")
    parser.add_argument("--overrides", nargs="*", default=[], help="Hydra overrides of every run")
    options = parser.parse_args(arguments)
    if options.rounds < 1 or len(set(options.variants)) < max(2, len(options.variants)):
        value = f"--rounds {options.rounds} --variants {options.variants}"
        print(f"error: {value}: expected 1 or more rounds of two variants or more, all different", file=sys.stderr)
        return 2

    def shown() -> Iterator[str]:
        rows = table(measure(options), options.variants)
        (options.output / "result.json").write_text(json.dumps(rows, indent=1) + "\n")
        yield from as_text(rows)

    return run_command(shown, (ValueError,), code=1)


if __name__ == "__main__":
    sys.exit(main())
