"""The rollout server: verl's vLLM server with speculation checked at start-up and measured in every step."""

import functools
import multiprocessing
import os
import time
from typing import Any

import ray
import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from recipe.launch import fork_server
from recipe.rollout.weight_sync import job_and_session
from sam.config import SpeculationConfig
from sam.sharing import link
from sam.vllm.hints import RequestHints
from sam.vllm.plugin import check_installed, scheduling_remark

ENGINE_NICE = 10  # of 19; at 0 a replica's server waits 0.2 s for a core when the engines take all of them


def yield_to_control_plane() -> None:
    """Let servers, router and client run before this thread, an engine's.

    They take little, but while they wait for a core that engines hold, slots stay empty and engines run more steps for
    the same tokens. In a cluster they have cores of their own. Only for an engine of one compute thread: others would
    be left at the priority they have, and wait for this one. Doing so twice changes nothing.
    """
    if torch.get_num_threads() == 1:
        os.setpriority(os.PRIO_PROCESS, 0, max(ENGINE_NICE, os.getpriority(os.PRIO_PROCESS, 0)))


class SpeculationWorkerExtension(vLLMColocateWorkerExtension):
    """Mixed into vLLM's worker; its methods are called through `collective_rpc`."""

    def sam_attach(self) -> dict[str, Any]:
        """Start recording engine steps; returns sam.vllm.plugin.installed of this worker."""
        from sam.vllm.plugin import installed
        from sam.vllm.step_recorder import StepRecorder

        status = installed(self.model_runner)
        self.sam_recorder = StepRecorder.attach(self.model_runner)
        return status

    def sam_share(self, address: str) -> None:
        """Let the drafter exchange text with those of other replicas, by the server that listens there."""
        if hasattr(drafter := getattr(self.model_runner, "drafter", None), "share"):
            drafter.share(address)

    def sam_yield(self) -> None:
        """On a CPU, once the threads are started that help this one: they would wait for a core as it does from now on,
        and all that time hold the interpreter that this one needs."""
        if self.device.type == "cpu":
            yield_to_control_plane()

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
        self._ended_by_length: set[str] = set()
        # What comes by verl's way and by vLLM's endpoints goes through it.
        self.engine.generate = self._noting_length(self.engine.generate)
        wanted = SpeculationConfig.from_dict(args.additional_config.get("speculation", {}))
        for status in await self.engine.collective_rpc("sam_attach"):
            check_installed(wanted, status)
            scheduling = "asynchronous" if status["asynchronous"] else "synchronous"
            print(
                f"rollout worker: drafter {status['drafter']}, verification {status['verification']}, "
                f"{scheduling} scheduling",
                flush=True,
            )
        if remark := scheduling_remark(wanted, status):
            print(remark, flush=True)
        if wanted.sharing != "replicas":
            await self.engine.collective_rpc("sam_yield")

    def _noting_length(self, generate):
        """vLLM's generate, which notes the chunks that ended because they had their tokens: verl reports `completed`
        for these as for complete responses."""

        @functools.wraps(generate)
        async def noting(prompt, sampling_params, request_id: str, **kwargs):
            is_chunk = RequestHints.of(sampling_params).response_limit is not None
            async for output in generate(prompt, sampling_params, request_id, **kwargs):
                if is_chunk and output.finished and output.outputs[0].finish_reason == "length":
                    self._ended_by_length.add(request_id)
                yield output

        return noting

    async def serve_sharing(self, log, run_id: str) -> None:
        """Pass on what drafters on this machine ask the log, an actor of sam.sharing.log.Log."""
        self._sharing_log = log  # a handle's methods do not keep it
        await log.exchange.remote(b"")  # the first call takes Ray a tenth of a second of CPU
        self._sharing_address = link.address_of(run_id, self.replica_rank)
        self._sharing_server = await link.serve(self._sharing_address, log.exchange.remote)

    async def share(self) -> None:
        """Let the engine's drafters share from now on; the servers of all machines listen."""
        await self.engine.collective_rpc("sam_share", args=(self._sharing_address,))
        await self.engine.collective_rpc("sam_yield")

    async def end_engine(self) -> None:
        """End the engine's processes, when the run has finished."""
        if (engine := getattr(self, "engine", None)) is not None:
            engine.shutdown()

    async def routing_limits(self) -> dict[str, int]:
        """What the engine holds, by its own numbers, for recipe.rollout.router."""
        vllm = self.engine.vllm_config
        return {
            "kv_tokens": vllm.cache_config.num_gpu_blocks * vllm.cache_config.block_size,
            "block_tokens": vllm.cache_config.block_size,
            "slots": vllm.scheduler_config.max_num_seqs * vllm.parallel_config.data_parallel_size,
            "max_model_len": vllm.model_config.max_model_len,
        }

    async def generate(self, prompt_ids, sampling_params, request_id, **kwargs):
        """verl's, timed: seconds count while at least one request is in the server. The stop reason of a chunk that
        goes on (recipe.rollout.client) is `length`."""
        if self._in_flight == 0:
            self._busy_since = time.monotonic()
        self._in_flight += 1
        try:
            output = await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
            if request_id in self._ended_by_length:
                output.stop_reason = "length"
            return output
        finally:
            self._ended_by_length.discard(request_id)
            self._in_flight -= 1
            if self._in_flight == 0:
                self._busy_seconds += time.monotonic() - self._busy_since

    async def take_rollout_record(self) -> tuple[bytes, float]:
        """The engine steps and busy seconds since the last call (of the first worker, whose drafts all verify)."""
        seconds, self._busy_seconds = self._busy_seconds, 0.0
        return (await self.engine.collective_rpc("sam_take_record"))[0], seconds


class SpeculationReplica(vLLMReplica):
    """verl's replica with this server in it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.server_class = ray.remote(SpeculationServer)
