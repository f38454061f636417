"""A training step's rollout as the servers measured it."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np

from sam.switch.step_cost import least_squares_without_negative_terms

SHORTEST_PAUSE = 1e-3  # seconds between engine steps; the recorder's own rounding is a millionth of that


@dataclass
class RolloutRecord:
    """One training step's rollout as the servers saw it.

    Attributes:
        arrays: the first replica's engine steps (sam.vllm.step_recorder.StepRecorder.take), its counters included.
        seconds: wall time with at least one request in the server; of the slowest replica.
        replicas: arrays of every replica, for the totals.
        replica_seconds: wall time with at least one request, of every replica.
    """

    arrays: dict[str, np.ndarray]
    seconds: float
    replicas: list[dict[str, np.ndarray]]
    replica_seconds: list[float]

    @classmethod
    def merge(cls, parts: list[tuple[bytes, float]]) -> RolloutRecord:
        replicas = [dict(np.load(io.BytesIO(blob))) for blob, _ in parts]
        seconds = [seconds for _, seconds in parts]
        return cls(replicas[0], max(seconds), replicas, seconds)

    def metrics(self, tail_threshold: int | None = None, rounds: int = 1) -> dict[str, float]:
        """The step's figures for wandb; milliseconds are per engine step, shares are of engine steps.

        Args:
            tail_threshold: running requests at or below which a replica is in its tail; None leaves the tail out.
            rounds: generation rounds that dynamic sampling needed.
        """

        def total(name: str) -> float:
            return float(sum(part[name].sum() for part in self.replicas))

        steps = max(1.0, float(sum(len(part["step_ms"]) for part in self.replicas)))
        drafted, accepted = total("drafted"), total("accepted")
        verified = total("position_steps")
        values = {
            "rollout/seconds": self.seconds,
            "rollout/engine_steps": steps,
            "rollout/tokens": total("emitted"),
            "rollout/spec_drafted_tokens": drafted,
            "rollout/spec_accepted_tokens": accepted,
            "rollout/spec_accept_rate": accepted / drafted if drafted else 0.0,
            "rollout/spec_accept_length": total("position_emitted") / verified if verified else 1.0,
            "rollout/spec_verify_steps": verified,
            "rollout/switch_on_share": total("drafting") / steps,
            "rollout/running_requests/max": float(max(part["running"].max(initial=0) for part in self.replicas)),
        }
        values |= self._timeline() | self._rounds(rounds)
        if tail_threshold is not None:
            values |= self._tail(tail_threshold)
        for part in ("step", "forward", "verify", "draft"):
            values[f"rollout/{part}_ms_per_step"] = total(f"{part}_ms") / steps
        parts = sum(values[f"rollout/{part}_ms_per_step"] for part in ("forward", "verify", "draft"))
        values["rollout/other_ms_per_step"] = max(0.0, values["rollout/step_ms_per_step"] - parts)
        if drafted:
            values["rollout/rejected_seconds"] = sum(map(rejected_seconds, self.replicas)) / len(self.replicas)
        drafted_at = sum(part["drafted_at"] for part in self.replicas)
        accepted_at = sum(part["accepted_at"] for part in self.replicas)
        for position, (d, a) in enumerate(zip(drafted_at, accepted_at, strict=True), start=1):
            if d:
                values[f"rollout/spec_accept_rate/position_{position}"] = float(a / d)
        for name, value in self.replicas[0].items():
            if name.startswith("counter_"):
                values[f"rollout/drafter/{name.removeprefix('counter_')}"] = float(value)
        return values

    def _tail(self, threshold: int) -> dict[str, float]:
        """Seconds of a replica's tail (mean of the replicas), and the tails' share of all replicas' engine time."""
        tails = [float(part["step_ms"][in_tail(part["running"], threshold)].sum()) for part in self.replicas]
        whole = float(sum(part["step_ms"].sum() for part in self.replicas))
        return {
            "rollout/tail_seconds": sum(tails) / len(tails) / 1e3,
            "rollout/tail_share": sum(tails) / whole if whole else 0.0,
        }

    def _rounds(self, rounds: int) -> dict[str, float]:
        """Each round's seconds in the slowest replica, and a replica's mean in a round as cann-recipes-train has it."""
        values = {}
        parts = [seconds for part in self.replicas if (seconds := round_seconds(part, rounds)) is not None]
        if parts:
            slowest = np.max(parts, axis=0).tolist()
            values = {f"rollout/round_seconds/{number}": value for number, value in enumerate(slowest, start=1)}
        mean = sum(self.replica_seconds) / len(self.replica_seconds)
        return {**values, "rollout/round_seconds/replica_mean": mean / rounds}

    def _timeline(self) -> dict[str, float]:
        """Requests running after each tenth of the first replica's rollout time."""
        ends = np.cumsum(self.arrays["step_ms"])
        if not len(ends):
            return {}
        at = np.searchsorted(ends, ends[-1] * np.arange(1, 10) / 10)
        running = self.arrays["running"][at]
        return {f"rollout/running_requests/at_{10 * (i + 1)}_percent": float(n) for i, n in enumerate(running)}


def token_milliseconds(arrays: dict[str, np.ndarray]) -> float:
    """What a draft token adds to an engine step, by least squares over the steps: fixed, requests, draft tokens."""
    steps = arrays["step_ms"] > 0
    columns = [np.ones(int(steps.sum())), arrays["running"][steps], arrays["drafted"][steps]]
    if len(columns[0]) < len(columns):
        return 0.0
    return float(least_squares_without_negative_terms(np.stack(columns, axis=1), arrays["step_ms"][steps])[2])


def rejected_seconds(arrays: dict[str, np.ndarray]) -> float:
    """Seconds of a replica's rollout that went into draft tokens that were rejected."""
    return token_milliseconds(arrays) * float(arrays["drafted"].sum() - arrays["accepted"].sum()) / 1e3


def round_seconds(arrays: dict[str, np.ndarray], rounds: int) -> np.ndarray | None:
    """How long a replica's engine worked on each generation round; None where it had no part in one of them.

    The next round is dispatched when the last response of this one is judged: the engine is idle meanwhile, longer than
    ever within a round.

    Args:
        arrays: end_s and step_ms, float [engine steps]: end in seconds, duration in milliseconds.

    Returns:
        float [rounds], seconds.
    """
    ends = arrays["end_s"]
    starts = ends - arrays["step_ms"].astype(np.float64) / 1e3
    pauses = starts[1:] - ends[:-1]
    firsts = 1 + np.sort(np.argsort(pauses, kind="stable")[len(pauses) - (rounds - 1) :])
    if len(ends) < rounds or (pauses[firsts - 1] < SHORTEST_PAUSE).any():
        return None
    return ends[np.append(firsts, len(ends)) - 1] - starts[np.insert(firsts, 0, 0)]


def in_tail(running: np.ndarray, threshold: int) -> np.ndarray:
    """Which engine steps belong to a tail: from when running requests first stay at or below `threshold` to the end
    of the generation round. A round begins where running requests rise above the threshold again; the steps on the
    way up are not tail. Without any step above it the whole rollout is tail.

    Args:
        running: int [engine steps]; threshold: requests.

    Returns:
        bool [engine steps].
    """
    above = running > threshold
    if not above.any():
        return np.ones(len(running), dtype=bool)
    tail = ~above
    rising = np.zeros(len(running), dtype=bool)
    for first in np.flatnonzero(above & ~np.concatenate([[False], above[:-1]])):
        step = first - 1
        while step >= 0 and not above[step] and running[step] < running[step + 1]:
            rising[step] = True
            step -= 1
        if step < 0 or (first > 0 and not above[:first].any()):
            rising[:first] = True
    return tail & ~rising
