"""The arguments that verl would start vLLM with, made by verl's own code and read by vLLM's own parser."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
from types import SimpleNamespace

from omegaconf import DictConfig


def vllm_arguments(config: DictConfig) -> tuple[list[str], argparse.Namespace]:
    """The command line of the first replica's first server, and what vLLM's parser makes of it.

    Raises:
        ValueError: vLLM refuses the command line; its own words.
    """
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.vllm_rollout import vllm_async_server

    from recipe.rollout.server import SpeculationServer

    found: dict = {}

    class Server(SpeculationServer):
        """As launch_server finds it, without Ray and without a start."""

        def __init__(self):
            rollout = config.actor_rollout_ref.rollout
            world = rollout.tensor_model_parallel_size * rollout.data_parallel_size
            self.config = omega_conf_to_dataclass(rollout)
            self.model_config = SimpleNamespace(
                local_path=config.actor_rollout_ref.model.path,
                trust_remote_code=config.actor_rollout_ref.model.trust_remote_code,
                lora={},
                lora_rank=0,
            )
            self.replica_rank = self.node_rank = 0
            self.gpus_per_node = min(world, config.trainer.n_gpus_per_node)
            self.nnodes = max(1, world // config.trainer.n_gpus_per_node)
            self.workers = [None] * self.gpus_per_node
            self._master_address, self._master_port, self._dp_rpc_port = "127.0.0.1", 1, 2
            self._disaggregation_role = "null"

        def _should_profile(self):
            return False

        def _apply_quantization(self):
            return None, {}

        async def run_server(self, args):
            found["parsed"] = args

    original = vllm_async_server.build_cli_args_from_config

    def recorded(arguments):
        found["command"] = original(arguments)
        return found["command"]

    complaints = io.StringIO()
    vllm_async_server.build_cli_args_from_config = recorded
    try:
        with contextlib.redirect_stderr(complaints), contextlib.redirect_stdout(io.StringIO()):
            asyncio.run(Server().launch_server())
    except SystemExit as error:
        said = [line for line in complaints.getvalue().strip().splitlines() if "errors.pydantic.dev" not in line]
        raise ValueError(said[-1]) from error
    finally:
        vllm_async_server.build_cli_args_from_config = original
    return found["command"], found["parsed"]
