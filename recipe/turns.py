"""`python -m recipe.turns`: compares policies in training runs of verl that rotate them from training step to step.

A machine's speed drifts between runs, and a process may be slower than the next for as long as it lives, by more than
policies differ. So every run has all policies, one for each training step, in its own order: in a Williams square each
policy has each step once, comes once in each run, and with an even number of policies follows each other policy once.
Sampling is exact: all runs generate the same tokens in a step, which is checked, so the seconds are of the same work.
Stock vLLM, which cannot train on a CPU, is timed afterwards on their text: recipe.against_stock.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from recipe.against_stock import against_stock, measured
from recipe.report.runs import ReportError, Run, compare_responses
from sam.command import run_command
from sam.config import SpeculationConfig

POLICIES = ("never", *(f"threshold {n}" for n in (4, 8, 16, 32, 64)), "always", "goodput")
MEASURES = {"rollout": "rollout/seconds", "tail": "rollout/tail_seconds"}
POLICY_INDEX = "rollout/drafter/policy_index"  # which policy of its rotation a training step had


def williams_square(size: int) -> np.ndarray:
    """int [size, size]: a Latin square; where `size` is even, each number follows each other number once in the rows.

    E. J. Williams, Experimental designs balanced for the estimation of residual effects of treatments, 1949.
    """
    first = [(i + 1) // 2 if i % 2 else -(i // 2) for i in range(size)]
    return (np.array(first)[None, :] + np.arange(size)[:, None]) % size


def effects(seconds: np.ndarray, policy: np.ndarray, policies: int, baseline: int) -> list[tuple[float, float, float]]:
    """Each policy's seconds over those of policy `baseline`: the estimate, and two standard errors below and above it.

    Least squares on log seconds = run + step + policy (Cochran and Cox, Experimental Designs, chapter 4.3). `seconds`
    and `policy`, the index of the one that drafted, are [runs, steps]; `policies` is their number.

    Raises:
        ValueError: too few runs or steps to tell the policies apart.
    """
    runs, steps = seconds.shape
    others = [p for p in range(policies) if p != baseline]
    run, step = (indices.ravel() for indices in np.indices((runs, steps)))
    columns = [run == r for r in range(1, runs)] + [step == s for s in range(1, steps)]
    columns += [np.ones(runs * steps), *(policy.ravel() == p for p in others)]
    design = np.stack(columns, axis=1).astype(float)
    freedom = len(design) - design.shape[1]
    if freedom < 1 or np.linalg.matrix_rank(design) < design.shape[1]:
        raise ValueError(f"{runs} runs of {steps} steps do not tell {policies} policies apart: give at least three")
    solution, *_ = np.linalg.lstsq(design, np.log(seconds.ravel()), rcond=None)
    residual = np.log(seconds.ravel()) - design @ solution
    variance = np.linalg.inv(design.T @ design).diagonal() * (residual @ residual) / freedom
    answer = [(1.0, 1.0, 1.0)] * policies
    for place, p in enumerate(others, start=len(columns) - len(others)):
        spread = 2.0 * np.sqrt(variance[place])
        answer[p] = tuple(float(v) for v in np.exp(solution[place] + np.array([0.0, -spread, spread])))
    return answer


def measure(output: Path, policies: list[str], cycles: int, overrides: list[str]) -> list[Path]:
    """Train with the policies in rotation, in as many runs as there are policies, `cycles` steps each in a run.

    Returns:
        The run directories; finished runs are not repeated.

    Raises:
        ReportError: a run failed.
    """
    from tqdm import tqdm

    output.mkdir(parents=True, exist_ok=True)
    steps = cycles * len(policies)
    directories = [output / str(number) for number in range(1, len(policies) + 1)]
    order = williams_square(len(policies))
    for directory, row in tqdm(list(zip(directories, order, strict=True)), unit="run", disable=None):
        rotation, name = ",".join(policies[i] for i in row), f"turns_{directory.name}"
        command = [
            *(sys.executable, "-m", "recipe.main_dapo", "--config-name", "dapo_tiny_cpu"),
            *(f"run_dir={directory}", f"trainer.experiment_name={name}", f"trainer.total_training_steps={steps}"),
            *(f"trainer.save_freq={steps}", "trainer.val_before_train=false", "trainer.test_freq=-1"),
            *("speculation=sam", f"speculation.policy_rotation=[{rotation}]", *overrides),
        ]
        if code := subprocess.run(command).returncode:
            raise ReportError(f"{directory}: the run ended with exit code {code}, see {directory}/train.log")
    return directories


def read(directories: list[Path], policies: list[str]) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Seconds by name of MEASURES, float [runs, steps], and the index of the policy that drafted, int [runs, steps].

    Raises:
        ReportError: a run has other policies or other steps, or its responses differ or were not recorded.
    """
    runs = [Run.load(directory) for directory in directories]
    for run in runs:
        if sorted(rotation_of(run)) != sorted(policies) or run.steps != runs[0].steps:
            raise ReportError(f"{run.source}: its policies or steps are others: name another --output")
        compared = compare_responses(run, runs[0])
        if missing := [s for s in run.steps if compared.get(s, (0, 0))[1] == 0]:
            raise ReportError(f"{run.source}: no responses of step {missing[0]} to compare: expected rollouts/ there")
        if different := [s for s, (same, of) in compared.items() if same < of]:
            raise ReportError(f"{run.source}: other responses than {runs[0].source} in step {different[0]}")
    steps = runs[0].steps
    seconds = {
        name: np.array([[run.metrics[step][key] for step in steps] for run in runs]) for name, key in MEASURES.items()
    }
    drafted = [[rotation_of(run)[int(run.metrics[step][POLICY_INDEX])] for step in steps] for run in runs]
    return seconds, np.array([[policies.index(policy) for policy in row] for row in drafted])


def rotation_of(run: Run) -> list[str]:
    """The policies that a run rotated through; empty if it had one."""
    return SpeculationConfig.from_dict(run.config["speculation"]).policy_rotation or []


def table(seconds: dict[str, np.ndarray], policy: np.ndarray, policies: list[str], baseline: str) -> list[dict]:
    """A row for each policy and measure: mean seconds a step, and the ratios of `effects`."""
    rows = []
    for measure_, values in seconds.items():
        ratios = effects(values, policy, len(policies), policies.index(baseline))
        for index, name in enumerate(policies):
            mean = float(values[policy == index].mean())
            rows.append({"measure": measure_, "policy": name, "seconds": mean, "ratio": ratios[index]})
    return rows


def as_text(rows: list[dict], baseline: str) -> str:
    """Lay out `table`'s rows as text."""
    lines = [f"{'':8} {'policy':13} {'seconds a step':>14}  its seconds over those of {baseline} (two standard errors)"]
    for row in rows:
        ratio = "{:.3f} ({:.3f}-{:.3f})".format(*row["ratio"])
        lines.append(f"{row['measure']:8} {row['policy']:13} {row['seconds']:14.2f}  {ratio}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipe.turns", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("outputs/turns"), help="its finished runs are kept")
    parser.add_argument("--policies", nargs="+", default=POLICIES, help="three or more, best an even number")
    parser.add_argument("--cycles", type=int, default=1, help="training steps of each policy in a run")
    parser.add_argument("--baseline", default="goodput", help="whose seconds the others' are divided by")
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--overrides", nargs="*", default=[], help="Hydra overrides of every run")
    options = parser.parse_args(arguments)
    policies = list(options.policies)
    if len(set(policies)) < 3 or len(set(policies)) < len(policies) or options.baseline not in policies:
        print(f"error: --policies {policies}: expected three or more, {options.baseline} among them", file=sys.stderr)
        return 2

    def shown() -> Iterator[str]:
        directories = measure(options.output, policies, options.cycles, options.overrides)
        rows = table(*read(directories, policies), policies, options.baseline)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
        yield as_text(rows, options.baseline)
        yield measured(against_stock(directories[0], options.output))

    return run_command(shown, (ValueError,), code=1)


if __name__ == "__main__":
    sys.exit(main())
