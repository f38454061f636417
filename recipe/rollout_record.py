"""A training step's rollout as the servers measured it."""

from __future__ import annotations

import io
from dataclasses import dataclass

import numpy as np


@dataclass
class RolloutRecord:
    """One training step's rollout as the servers saw it.

    Attributes:
        arrays: the first replica's engine steps (sam.vllm.metrics.StepRecorder.take), its counters included.
        seconds: wall time with at least one request in the server; of the slowest replica.
        replicas: arrays of every replica, for the totals.
    """

    arrays: dict[str, np.ndarray]
    seconds: float
    replicas: list[dict[str, np.ndarray]]

    @classmethod
    def merge(cls, parts: list[tuple[bytes, float]]) -> RolloutRecord:
        replicas = [dict(np.load(io.BytesIO(blob))) for blob, _ in parts]
        return cls(replicas[0], max(seconds for _, seconds in parts), replicas)

    def metrics(self) -> dict[str, float]:
        """The step's figures for wandb; milliseconds are per engine step, shares are of engine steps."""

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
            "rollout/switch_on_share": total("drafting") / steps,
            "rollout/running_requests/max": float(max(part["running"].max(initial=0) for part in self.replicas)),
        }
        values |= self._timeline()
        for part in ("step", "forward", "verify", "draft"):
            values[f"rollout/{part}_ms_per_step"] = total(f"{part}_ms") / steps
        drafted_at = sum(part["drafted_at"] for part in self.replicas)
        accepted_at = sum(part["accepted_at"] for part in self.replicas)
        for position, (d, a) in enumerate(zip(drafted_at, accepted_at, strict=True), start=1):
            if d:
                values[f"rollout/spec_accept_rate/position_{position}"] = float(a / d)
        for name, value in self.replicas[0].items():
            if name.startswith("counter_"):
                values[f"rollout/drafter/{name.removeprefix('counter_')}"] = float(value)
        return values

    def _timeline(self) -> dict[str, float]:
        """Requests running after each tenth of the first replica's rollout time."""
        ends = np.cumsum(self.arrays["step_ms"])
        if not len(ends):
            return {}
        at = np.searchsorted(ends, ends[-1] * np.arange(1, 10) / 10)
        running = self.arrays["running"][at]
        return {f"rollout/running_requests/at_{10 * (i + 1)}_percent": float(n) for i, n in enumerate(running)}
