"""The rollout server: verl's vLLM server with speculation checked at start-up and measured in every step."""

from __future__ import annotations

import io
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from verl.workers.rollout.replica import RolloutReplicaRegistry
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica


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


class SpeculationWorkerExtension(vLLMColocateWorkerExtension):
    """Mixed into vLLM's worker; its methods are called through `collective_rpc`."""

    def sam_attach(self) -> dict[str, Any]:
        """Start recording engine steps and say what really is installed in this worker."""
        from sam.vllm.metrics import StepRecorder
        from sam.vllm.plugin import installed

        status = installed(self.model_runner)
        self.sam_recorder = StepRecorder.attach(self.model_runner)
        return status

    def sam_take_record(self) -> bytes:
        buffer = io.BytesIO()
        np.savez(buffer, **self.sam_recorder.take())
        return buffer.getvalue()


class SpeculationServer(vLLMHttpServer):
    """vLLM server of one replica. Refuses to serve when the drafter or sampler asked for is not the one in place."""

    def _get_worker_extension_cls(self) -> str:
        return "recipe.rollout.SpeculationWorkerExtension"

    async def run_server(self, args):
        await super().run_server(args)
        self._in_flight, self._busy_since, self._busy_seconds = 0, 0.0, 0.0
        wanted = args.additional_config.get("speculation", {})
        for status in await self.engine.collective_rpc("sam_attach"):
            check_installed(wanted, status)

    async def generate(self, *args, **kwargs):
        if self._in_flight == 0:
            self._busy_since = time.monotonic()
        self._in_flight += 1
        try:
            return await super().generate(*args, **kwargs)
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._busy_seconds += time.monotonic() - self._busy_since

    async def take_rollout_record(self) -> tuple[bytes, float]:
        """The engine steps and busy seconds since the last call (of the first worker: ranks draft alike)."""
        seconds, self._busy_seconds = self._busy_seconds, 0.0
        return (await self.engine.collective_rpc("sam_take_record"))[0], seconds


def check_installed(wanted: dict[str, Any], status: dict[str, Any]) -> None:
    """Raise RuntimeError unless a worker runs the drafter and the verification that the config asks for."""
    drafters = {
        "sam": "SamProposer",
        "ngram": "NgramProposer",
        "suffix": "SuffixDecodingProposer",
        "off": None,
    }
    expected = {"drafter": drafters[wanted["method"]], "verification": wanted["verification"]}
    for part, name in expected.items():
        if status.get(part) != name:
            raise RuntimeError(
                f"rollout worker has {part} {status.get(part)}, expected {name} for speculation="
                f"{wanted['method']}: is the project installed where vLLM runs (pip install -e .)?"
            )
    print(f"rollout worker: drafter {status['drafter']}, verification {status['verification']}", flush=True)


class SpeculationReplica(vLLMReplica):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(SpeculationServer)


def register() -> None:
    """Make `rollout.name=vllm` mean this server (verl's registry of replicas)."""
    RolloutReplicaRegistry.register("vllm", lambda: SpeculationReplica)
