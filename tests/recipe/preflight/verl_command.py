"""The arguments that verl starts vLLM with, made by verl's own code: recipe.preflight.vllm_command must agree."""

import asyncio
from types import SimpleNamespace

from omegaconf import DictConfig
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.vllm_rollout import vllm_async_server

from recipe.rollout.server import SpeculationServer


class CommandLine(Exception):
    """Thrown where verl would start vLLM."""


def verl_command(config: DictConfig, monkeypatch) -> list[str]:
    """The command line of the first replica's first server, without `serve` and the model."""
    rollout = config.actor_rollout_ref.rollout
    world = rollout.tensor_model_parallel_size * rollout.data_parallel_size

    class Server(SpeculationServer):
        """As launch_server finds it, without Ray and without a start."""

        def __init__(self):
            model = config.actor_rollout_ref.model
            self.config = omega_conf_to_dataclass(rollout)
            self.model_config = SimpleNamespace(
                local_path=model.path, trust_remote_code=model.trust_remote_code, lora={}, lora_rank=0
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

    original = vllm_async_server.build_cli_args_from_config

    def stop(arguments):
        raise CommandLine(original(arguments))

    monkeypatch.setattr(vllm_async_server, "build_cli_args_from_config", stop)
    try:
        asyncio.run(Server().launch_server())
    except CommandLine as found:
        return found.args[0]
    raise AssertionError("verl has started vLLM by other means")
