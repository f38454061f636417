"""The recipe's rollout servers, which end every response at a length that is given, and note when each one ran."""

import functools
import time
from collections.abc import Callable
from typing import Any

import ray
from omegaconf import DictConfig
from verl.workers.rollout.replica import RolloutMode

from recipe.rollout.server import SpeculationServer, SpeculationWorkerExtension
from sam.vllm.bench.forced_text import ARGUMENT, FREE, ForcedTextExtension


class BenchWorkerExtension(ForcedTextExtension, SpeculationWorkerExtension):
    """Mixed into vLLM's worker."""

    def sam_attach(self) -> dict[str, Any]:
        self.sam_force_text([])  # before the recorder, which is to time it too
        return super().sam_attach()

    def sam_least_step(self, milliseconds: float) -> None:
        """From now on every step takes at least so long: its end waits."""
        runner = self.model_runner
        runner.execute_model, runner.sample_tokens = lasting(
            runner.execute_model, runner.sample_tokens, milliseconds / 1e3
        )


def lasting(execute: Callable, sample: Callable, seconds: float) -> tuple[Callable, Callable]:
    """A step's two parts, `execute` and then `sample`, together at least `seconds` long."""
    began = 0.0

    @functools.wraps(execute)
    def timed(*arguments, **keywords):
        nonlocal began
        began = time.monotonic()
        return execute(*arguments, **keywords)

    @functools.wraps(sample)
    def waiting(*arguments, **keywords):
        output = sample(*arguments, **keywords)
        time.sleep(max(0.0, began + seconds - time.monotonic()))
        return output

    return timed, waiting


class BenchServer(SpeculationServer):
    """The recipe's server; all of a response's tokens but its last are sampled as always."""

    def _get_worker_extension_cls(self) -> str:
        return f"{__name__}.BenchWorkerExtension"

    async def run_server(self, args):
        """The recipe's, with every request's span noted."""
        await super().run_server(args)
        self._spans: list[tuple[int, float, float]] = []
        self.engine.generate = self._noting_span(self.engine.generate)

    def _noting_span(self, generate):
        """vLLM hands on a request's first token at once, whatever `stream_interval` says, and then the last ones."""

        @functools.wraps(generate)
        async def noting(*args, sampling_params, **kwargs):
            started = 0.0
            async for output in generate(*args, sampling_params=sampling_params, **kwargs):
                started = started or time.time()
                yield output
            self._spans.append((sampling_params.extra_args[ARGUMENT], started, time.time()))

        return noting

    async def last_at_least(self, milliseconds: float) -> None:
        """From now on every step of the engine takes at least so long."""
        await self.engine.collective_rpc("sam_least_step", args=(milliseconds,))

    async def begin(self, lengths: list[int], end_token: int) -> None:
        """Forget what was cached; from now on response i gets `end_token` as its token number lengths[i]."""
        await self.clear_kv_cache()
        responses = [[FREE] * (length - 1) + [end_token] for length in lengths]
        await self.engine.collective_rpc("sam_force_text", args=(responses,))
        self._spans.clear()

    async def take_spans(self) -> list[tuple[int, float, float]]:
        """Number of the response, and seconds since the epoch of its first and last token here, of each chunk."""
        spans, self._spans = self._spans, []
        return spans


def start_servers(config: DictConfig, replicas: int, first: int) -> tuple[list[Any], list[Any]]:
    """Actors of `replicas` servers that are being started, numbered from `first`; and what says that they serve."""
    handles = [
        ray.remote(BenchServer)
        .options(num_cpus=0)
        .remote(
            config=config.actor_rollout_ref.rollout,
            model_config=config.actor_rollout_ref.model,
            rollout_mode=RolloutMode.STANDALONE,
            workers=[],
            replica_rank=first + number,
            node_rank=0,
            gpus_per_node=1,
            nnodes=1,
            cuda_visible_devices="",
        )
        for number in range(replicas)
    ]
    return handles, [handle.launch_server.remote() for handle in handles]
