"""The rollout server: verl's vLLM server with speculation checked at start-up and measured in every step."""

import multiprocessing
import os
import secrets
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import ray
import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica

from recipe.sam_dapo.launch import fork_server, speculation
from sam.config import SpeculationConfig
from sam.engine.requests import RequestHints
from sam.patching import wrap
from sam.record.engine_steps import EngineSteps
from sam.sharing import link
from sam.sharing.log import Log
from sam.vllm.plugin import check_installed

LOG_SECONDS = 60.0  # for the log of shared text to be started
PROGRESS_SECONDS = 5.0  # that a rollout's progress is waited for
STOP_SECONDS = 10.0  # that the end of a run waits for engines to end
ENGINE_NICE = 10  # of 19; at 0 a replica's server waits 0.2 s for a core when the engines take all of them


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
        drafter = getattr(self.model_runner, "drafter", None)
        if hasattr(drafter, "share"):
            drafter.share(address)

    def sam_yield(self) -> None:
        """On a CPU let servers, router and client run before an engine: while they wait for a core, slots stay empty.

        Once the threads are started that help this one, the engine's: they would wait for a core as it does from now
        on, and hold the interpreter meanwhile. And only where it computes alone: others would wait for this one.
        """
        if self.device.type == "cpu" and torch.get_num_threads() == 1:
            os.setpriority(os.PRIO_PROCESS, 0, max(ENGINE_NICE, os.getpriority(os.PRIO_PROCESS, 0)))

    def sam_progress(self) -> tuple[int, int, int, int]:
        """StepRecorder.progress."""
        return self.sam_recorder.progress()

    def sam_take_record(self) -> bytes:
        """The engine steps since the last call, as EngineSteps.to_bytes."""
        return self.sam_recorder.take().to_bytes()


class SpeculationServer(vLLMHttpServer):
    """vLLM server of one replica. Refuses to serve when the drafter or sampler asked for is not the one in place."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._finish_reasons: dict[str, str | None] = {}  # of the requests that are in the server
        self._in_engine = 0  # requests
        self._busy_seconds = 0.0
        self._counted_at = 0.0
        if fork_server.EXECUTABLE in os.environ:
            multiprocessing.set_executable(os.environ[fork_server.EXECUTABLE])  # that start the engine

    def _get_worker_extension_cls(self) -> str:
        return "recipe.sam_dapo.rollout.server.SpeculationWorkerExtension"

    async def run_server(self, args):
        """verl's, then refuse to serve unless every worker runs what the config asks for."""
        await super().run_server(args)
        wrap(self.engine, "generate", "count_busy_seconds", self._watched)
        wanted = SpeculationConfig.from_dict(args.additional_config.get("speculation", {}))
        for status in await self.engine.collective_rpc("sam_attach"):
            check_installed(wanted, status)
            scheduling = "asynchronous" if status["asynchronous"] else "synchronous"
            parts = f"drafter {status['drafter']}, verification {status['verification']}, {scheduling} scheduling"
            print(f"rollout worker: {parts}", flush=True)
        if wanted.sharing != "replicas":
            await self.engine.collective_rpc("sam_yield")

    async def _watched(self, generate, prompt, sampling_params, request_id: str, **kwargs):
        """vLLM's generate. Seconds count while at least one request is in the engine: between an interruption and the
        next weights, requests wait in the server."""
        self._count_seconds(entering=1)
        try:
            async for output in generate(prompt, sampling_params, request_id, **kwargs):
                if request_id in self._finish_reasons and output.outputs:  # not vLLM's own endpoints'
                    self._finish_reasons[request_id] = output.outputs[0].finish_reason
                yield output
        finally:
            self._count_seconds(entering=-1)

    def _count_seconds(self, entering: int = 0) -> None:
        now = time.monotonic()
        if self._in_engine:
            self._busy_seconds += now - self._counted_at
        self._counted_at = now
        self._in_engine += entering

    async def generate(self, prompt_ids, sampling_params, request_id, **kwargs):
        """verl's, which says `completed` of a chunk that ended because it had its tokens, too: `length`
        (recipe.sam_dapo.rollout.agent_loop)."""
        is_chunk = RequestHints.of(SimpleNamespace(**sampling_params)).response_limit is not None
        self._finish_reasons[request_id] = None
        try:
            output = await super().generate(prompt_ids, sampling_params, request_id, **kwargs)
        finally:
            reason = self._finish_reasons.pop(request_id, None)
        if is_chunk and reason == "length":
            output.stop_reason = reason
        return output

    async def take_rollout_record(self) -> tuple[bytes, float]:
        """The engine steps and busy seconds since the last call (of the first worker, whose drafts all verify)."""
        self._count_seconds()  # of a batch that never empties, too
        seconds = self._busy_seconds
        self._busy_seconds = 0.0
        records = await self.engine.collective_rpc("sam_take_record")
        return records[0], seconds

    async def progress(self) -> tuple[int, int, int, int]:
        """Of the first worker, StepRecorder.progress."""
        return (await self.engine.collective_rpc("sam_progress"))[0]

    async def routing_limits(self) -> dict[str, int]:
        """What the engine holds, by its own numbers, for recipe.sam_dapo.rollout.router."""
        vllm = self.engine.vllm_config
        return {
            "kv_tokens": vllm.cache_config.num_gpu_blocks * vllm.cache_config.block_size,
            "block_tokens": vllm.cache_config.block_size,
            "slots": vllm.scheduler_config.max_num_seqs * vllm.parallel_config.data_parallel_size,
            "max_model_len": vllm.model_config.max_model_len,
        }

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
        engine = getattr(self, "engine", None)
        if engine is not None:
            engine.shutdown()


class SpeculationReplica(vLLMReplica):
    """verl's replica with this server in it, where its engine is given a `speculation`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if speculation.reaches_engine(self.config):
            self.server_class = ray.remote(SpeculationServer)
            STARTED.append(self)


STARTED: list[SpeculationReplica] = []  # by this process


def take_steps() -> list[tuple[EngineSteps, float]]:
    """Every replica's engine steps, and seconds with a request in its engine, since the last call; without replicas
    that slept."""
    parts = ray.get([replica.servers[0].take_rollout_record.remote() for replica in STARTED])
    taken = [(EngineSteps.from_bytes(content), seconds) for content, seconds in parts]
    return [(steps, seconds) for steps, seconds in taken if len(steps)]


def progress() -> dict[str, float]:
    """Running requests, tokens and acceptance length of all replicas since the last call of `take_steps`; nothing where
    one does not answer, of which others tell."""
    with suppress(ray.exceptions.RayError, ValueError):  # the latter without a replica
        parts = ray.get([replica.servers[0].progress.remote() for replica in STARTED], timeout=PROGRESS_SECONDS)
        running, tokens, verified, emitted = map(sum, zip(*parts, strict=True))
        return {"running": running, "tokens": tokens, "length": emitted / verified if verified else 1.0}
    return {}


def end_engines() -> None:
    """End the processes of all engines; raises where that takes STOP_SECONDS."""
    ray.get([server.end_engine.remote() for replica in STARTED for server in replica.servers], timeout=STOP_SECONDS)


def share_text(mib: int):
    """Start the log through which drafters see other replicas' text, of at most `mib` MiB, and tell all replicas.

    Returns:
        The log's actor, which ends when nobody holds it. None if that failed: drafters then see their own replica's.
    """
    try:
        log = ray.remote(Log).options(num_cpus=0, max_restarts=-1).remote(mib << 20)  # one that dies starts anew, empty
        run_id = secrets.token_hex(8)
        servers = [server for replica in STARTED for server in replica.servers]
        ray.get([server.serve_sharing.remote(log, run_id) for server in servers], timeout=LOG_SECONDS)
        ray.get([replica.servers[0].share.remote() for replica in STARTED])
        return log
    except Exception as error:  # Ray's, or a machine's that lets nobody listen: it costs drafts alone
        print(f"speculation.sharing=replicas: no log, drafters see their own replica only: {error!r}", flush=True)
        return None
