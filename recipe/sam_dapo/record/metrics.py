"""The metrics of a training step's rollout, as wandb and metrics.jsonl get them (docs/metrics.md)."""

import numpy as np

from sam.record.engine_steps import EngineSteps

# Totals of the drafter that nobody acts on: engine_steps/<step>.npz has them.
ON_DISK_ONLY = {
    "tracked_requests",
    "waited_steps",
    "late_steps",
    "exploring_steps",
    "path_tokens",
    "history_appended_tokens",
    "history_written_responses",
    "sharing_sent_tokens",
    "draft_model_passes",
    "draft_model_requests",
    "draft_model_read_tokens",
}


def rollout_metrics(replicas: list[EngineSteps], seconds: list[float], tail_threshold: int) -> dict[str, float]:
    """The metrics of a training step's rollout. Milliseconds are per engine step, shares are of engine steps.

    Args:
        seconds: wall time with at least one request in the engine, of every replica.
        tail_threshold: running requests at or below which a replica is in its tail.
    """
    steps = max(1.0, float(sum(map(len, replicas))))
    tail_ms = sum(float(part.step_ms[part.in_tail(tail_threshold)].sum()) for part in replicas)
    values = {
        "seconds": max(seconds),
        "engine_steps": steps,
        "tokens": _total(replicas, "emitted"),
        "preemptions": _total(replicas, "preemptions"),
        "tail_seconds": tail_ms / len(replicas) / 1e3,  # mean of the replicas
        "tail_share": _ratio(tail_ms, _total(replicas, "step_ms"), 0.0),
        "switch_on_share": _total(replicas, "drafting") / steps,
        "asynchronous_scheduling": float(all(part.asynchronous for part in replicas)),
    }
    values |= _of_drafts(replicas)
    values |= _of_time(replicas, steps)
    values |= _of_graphs(replicas)
    for name, count in replicas[0].counters.items():
        if name not in ON_DISK_ONLY:
            values[f"drafter/{name}"] = float(count)
    return {f"rollout/{name}": value for name, value in values.items()}


def _total(replicas: list[EngineSteps], name: str) -> float:
    """The sum of a column over the steps of all replicas."""
    return float(sum(np.sum(getattr(part, name)) for part in replicas))


def _ratio(part: float, whole: float, without: float) -> float:
    """Part / whole, or `without` where there is no whole."""
    return part / whole if whole else without


def _of_drafts(replicas: list[EngineSteps]) -> dict[str, float]:
    """How many draft tokens were verified and accepted: in all, by position in a draft, and by turn."""
    drafted = _total(replicas, "drafted")
    accepted = _total(replicas, "accepted")
    verified = _total(replicas, "turn_steps")
    values = {
        "spec_drafted_tokens": drafted,
        "spec_accepted_tokens": accepted,
        "spec_accept_rate": _ratio(accepted, drafted, 0.0),
        "spec_accept_length": _ratio(_total(replicas, "turn_emitted"), verified, 1.0),
        "spec_verify_steps": verified,
    }
    drafted_at = sum(part.drafted_at for part in replicas)
    accepted_at = sum(part.accepted_at for part in replicas)
    for position in np.flatnonzero(drafted_at):
        rate = float(accepted_at[position] / drafted_at[position])
        values[f"spec_accept_rate/position_{position + 1}"] = rate
    for turn, length in EngineSteps.turn_lengths(replicas).items():
        values[f"spec_accept_length/turn_{turn}"] = length
    return values


def _of_time(replicas: list[EngineSteps], steps: float) -> dict[str, float]:
    """Milliseconds of an engine step, and of what it consists of."""
    whole = _total(replicas, "step_ms") / steps
    parts = {name: _total(replicas, f"{name}_ms") / steps for name in ("forward", "verify", "draft")}
    other = max(0.0, whole - sum(parts.values()))
    return {f"{name}_ms_per_step": value for name, value in {"step": whole, **parts, "other": other}.items()}


def _of_graphs(replicas: list[EngineSteps]) -> dict[str, float]:
    """The shares of steps that replayed a graph; none where a replica has no graphs, or there were no such steps."""
    replays = [part.replays() for part in replicas]
    if None in replays:
        return {}
    shares = {}
    for phase in replays[0]:
        replayed, all_steps = np.sum([counts[phase] for counts in replays], axis=0)
        if all_steps:
            shares[f"graph_share/{phase}"] = float(replayed / all_steps)
    return shares
