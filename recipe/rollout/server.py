"""The rollout server: verl's vLLM server with speculation checked at start-up and measured in every step."""

import multiprocessing
import os
import time
from typing import Any

import ray
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from recipe.launch import fork_server
from recipe.rollout.weight_sync import job_and_session
from sam.config import SpeculationConfig
from sam.vllm.plugin import check_installed


class SpeculationWorkerExtension(vLLMColocateWorkerExtension):
    """Mixed into vLLM's worker; its methods are called through `collective_rpc`."""

    def sam_attach(self) -> dict[str, Any]:
        """Start recording engine steps; returns sam.vllm.plugin.installed of this worker."""
        from sam.vllm.plugin import installed
        from sam.vllm.step_recorder import StepRecorder

        status = installed(self.model_runner)
        self.sam_recorder = StepRecorder.attach(self.model_runner)
        return status

    def update_weights_from_ipc(self, *args, **kwargs):
        """verl's, and tells the drafter that the weights are new."""
        result = super().update_weights_from_ipc(*args, **kwargs)
        if hasattr(drafter := getattr(self.model_runner, "drafter", None), "weights_updated"):
            drafter.weights_updated()
        return result

    def sam_take_record(self) -> bytes:
        """The engine steps since the last call, as EngineSteps.to_bytes."""
        return self.sam_recorder.take().to_bytes()


class SpeculationServer(vLLMHttpServer):
    """vLLM server of one replica. Refuses to serve when the drafter or sampler asked for is not the one in place."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        os.environ["VERL_RAY_JOB_ID"] = job_and_session()  # for the engine's processes
        if fork_server.EXECUTABLE in os.environ:
            multiprocessing.set_executable(os.environ[fork_server.EXECUTABLE])  # that start the engine

    def _get_worker_extension_cls(self) -> str:
        return "recipe.rollout.server.SpeculationWorkerExtension"

    async def run_server(self, args):
        """verl's, then refuse to serve unless every worker runs what the config asks for."""
        await super().run_server(args)
        self._in_flight, self._busy_since, self._busy_seconds = 0, 0.0, 0.0
        wanted = SpeculationConfig.from_dict(args.additional_config.get("speculation", {}))
        for status in await self.engine.collective_rpc("sam_attach"):
            check_installed(wanted, status)
            print(f"rollout worker: drafter {status['drafter']}, verification {status['verification']}", flush=True)

    async def generate(self, *args, **kwargs):
        """verl's, timed: seconds count while at least one request is in the server."""
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


class SpeculationReplica(vLLMReplica):
    """verl's replica with this server in it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(SpeculationServer)
