"""Compares simulated rollouts of recorded runs with the runs' own measurements."""

from tqdm import tqdm

from sam.simulate.run import RecordedRun
from sam.simulate.scenario import Scenario


def validate(runs: list[RecordedRun], scenarios: list[Scenario]) -> list[dict]:
    """Simulate each run with its own responses, drafter and policy; returns a row each."""
    rows = []
    total = sum(scenario.num_tokens for scenario in scenarios)
    with tqdm(total=total, unit="tok", desc="recorded runs", mininterval=2.0, disable=None) as bar:
        for run, scenario in zip(runs, scenarios, strict=True):
            outcome, _ = scenario.play(scenario.choice, scenario.choice.threshold, bar.update)
            measured = sum(run.seconds.values())
            recorded = [run.engine_steps(step) for step in run.seconds]
            drafted = sum(int(steps.drafted.sum()) for steps in recorded)
            accepted = sum(int(steps.accepted.sum()) for steps in recorded)
            rows.append({
                "run": str(run.directory), "method": run.speculation.method, "policy": scenario.choice.label,
                "training_steps": len(run.seconds), "measured_seconds": round(measured, 3),
                "seconds": round(outcome.seconds, 3), "error": round(outcome.seconds / measured - 1, 4),
                "measured_engine_steps": sum(map(len, recorded)),
                "engine_steps": outcome.engine_steps, "measured_drafted": drafted, "drafted": outcome.drafted,
                "measured_accepted": accepted, "accepted": outcome.accepted,
            })  # fmt: skip
    return rows


def table(rows: list[dict]) -> str:
    lines = [
        f"{'run':28} {'policy':>18} {'measured s':>10} {'simulated':>9} {'error':>7} {'steps':>13} "
        f"{'drafted':>15} {'accepted':>15}"
    ]
    for row in rows:
        pairs = [f"{row[f'measured_{name}']}/{row[name]}" for name in ("engine_steps", "drafted", "accepted")]
        lines.append(
            f"{row['method'] + ' ' + row['run'][-22:]:28} {row['policy']:>18} {row['measured_seconds']:10.2f} "
            f"{row['seconds']:9.2f} {row['error']:+7.1%} {pairs[0]:>13} {pairs[1]:>15} {pairs[2]:>15}"
        )
    return "\n".join(lines)
