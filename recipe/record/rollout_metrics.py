"""The metrics of a training step's rollout, as the servers measured it."""

from dataclasses import dataclass
from typing import Self

import numpy as np

from sam.record.engine_steps import EngineSteps


@dataclass
class RolloutRecord:
    """The rollout of one training step.

    Attributes:
        replicas: the engine steps of every replica; the first one's are kept on disk.
        replica_seconds: wall time with at least one request in the server, of every replica.
    """

    replicas: list[EngineSteps]
    replica_seconds: list[float]

    @classmethod
    def merge(cls, parts: list[tuple[bytes, float]]) -> Self:
        """From what each server's `take_rollout_record` gave."""
        blobs, seconds = zip(*parts, strict=True)
        return cls(list(map(EngineSteps.from_bytes, blobs)), list(seconds))

    def metrics(self, tail_threshold: int | None = None, rounds: int = 1) -> dict[str, float]:
        """The step's figures for wandb, after so many generation rounds; a replica is in its tail at or below
        `tail_threshold` running requests. Milliseconds are per engine step, shares are of engine steps."""
        steps = max(1.0, float(sum(map(len, self.replicas))))
        milliseconds = {name: self._total(f"{name}_ms") / steps for name in ("step", "forward", "verify", "draft")}
        other = milliseconds["step"] - sum(list(milliseconds.values())[1:])
        values = {
            "rollout/seconds": max(self.replica_seconds),
            "rollout/engine_steps": steps,
            "rollout/tokens": self._total("emitted"),
            "rollout/switch_on_share": self._total("drafting") / steps,
            "rollout/asynchronous_scheduling": float(all(part.asynchronous for part in self.replicas)),
            "rollout/preemptions": self._total("preemptions"),
            "rollout/running_requests/max": float(max(part.running.max(initial=0) for part in self.replicas)),
            **{f"rollout/{name}_ms_per_step": value for name, value in milliseconds.items()},
            "rollout/other_ms_per_step": max(0.0, other),
        }
        values |= self._acceptance() | self._rounds(rounds) | self._graphs()
        if tail_threshold is not None:
            values |= self._tail(tail_threshold)
        return values | {f"rollout/drafter/{name}": float(value) for name, value in self.replicas[0].counters.items()}

    def _total(self, name: str) -> float:
        return float(sum(np.sum(getattr(part, name)) for part in self.replicas))

    def _acceptance(self) -> dict[str, float]:
        """What was drafted, verified and accepted, by position in the draft as well, and of a draft model's tokens."""
        drafted, accepted, verified = map(self._total, ("drafted", "accepted", "position_steps"))
        values = {
            "rollout/spec_drafted_tokens": drafted,
            "rollout/spec_accepted_tokens": accepted,
            "rollout/spec_accept_rate": accepted / drafted if drafted else 0.0,
            "rollout/spec_accept_length": self._total("position_emitted") / verified if verified else 1.0,
            "rollout/spec_verify_steps": verified,
        }
        drafted_at, accepted_at = (sum(getattr(p, n) for p in self.replicas) for n in ("drafted_at", "accepted_at"))
        for position, (count, right) in enumerate(zip(drafted_at, accepted_at, strict=True), start=1):
            if count:
                values[f"rollout/spec_accept_rate/position_{position}"] = float(right / count)
        if tokens := self._total("draft_model_drafted_tokens"):
            values["rollout/spec_draft_model_tokens"] = tokens
            values["rollout/spec_draft_model_accept_rate"] = self._total("draft_model_accepted_tokens") / tokens
        return values

    def _graphs(self) -> dict[str, float]:
        """Steps with drafts; by phase, the share that replayed a graph: no value without graphs, or without steps."""
        values = {"rollout/steps_with_drafts": float(sum(int((part.drafted > 0).sum()) for part in self.replicas))}
        replays = [part.replays() for part in self.replicas]
        if None in replays:
            return values
        for phase in replays[0]:
            replayed, steps = np.sum([one[phase] for one in replays], axis=0)
            if steps:
                values[f"rollout/graph_share/{phase}"] = float(replayed / steps)
        return values

    def _tail(self, threshold: int) -> dict[str, float]:
        """Seconds of a replica's tail (mean of the replicas), and the tails' share of all replicas' engine time."""
        tail, whole = (
            sum(float(part.step_ms[part.in_tail(threshold)].sum()) for part in self.replicas),
            self._total("step_ms"),
        )
        return {
            "rollout/tail_seconds": tail / len(self.replicas) / 1e3,
            "rollout/tail_share": tail / whole if whole else 0.0,
        }

    def _rounds(self, rounds: int) -> dict[str, float]:
        """Each round's seconds in the slowest replica, and a replica's mean in a round as cann-recipes-train has it."""
        parts = [seconds for part in self.replicas if (seconds := part.round_seconds(rounds)) is not None]
        slowest = np.max(parts, axis=0).tolist() if parts else []
        values = {f"rollout/round_seconds/{number}": value for number, value in enumerate(slowest, start=1)}
        mean = sum(self.replica_seconds) / len(self.replica_seconds)
        return {**values, "rollout/round_seconds/replica_mean": mean / rounds}


def routing_metrics(figures: dict[str, float]) -> dict[str, float]:
    """For wandb, of what sam.routing.meter.Meter.take gave."""
    return {f"rollout/routing/{name}": value for name, value in figures.items()}
