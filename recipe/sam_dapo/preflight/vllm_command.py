"""Asks verl and vLLM themselves whether they take a config, and says it in their words.

verl validates the config, and its `launch_server` writes vLLM's command line; vLLM's parser reads it and, where the
device and the model are there, builds the engine's config. A run asks in Ray, in the process that imports both anyway,
before a worker takes a device; `sam doctor` asks in its own.
"""

import asyncio
import contextlib
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from omegaconf import DictConfig

from recipe.sam_dapo.launch.config import ConfigError
from recipe.sam_dapo.preflight.settings import model_of

LONGEST_REASON = 300  # characters; some of vLLM's errors list every attention backend


def check(config: DictConfig) -> None:
    """Raise ConfigError with what verl or vLLM says against a config."""
    for line in what_verl_and_vllm_say(config):
        raise ConfigError(line)


def what_verl_and_vllm_say(config: DictConfig) -> Iterator[str]:
    """One line, of the first thing that they refuse; both are imported, which takes 15 s."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils import hf_tokenizer
    from verl.utils.config import validate_config
    from verl.utils.tracking import Tracking

    asked = "verl"  # who refuses, if something is refused
    try:
        validate_config(config, need_reference_policy(config), need_critic(config))
        get_adv_estimator_fn(config.algorithm.adv_estimator)
        get_policy_loss_fn(config.actor_rollout_ref.actor.policy_loss.loss_mode)
        loggers = config.trainer.logger
        for name in [loggers] if isinstance(loggers, str) else loggers:
            if name not in Tracking.supported_backend:
                raise ValueError(f"trainer.logger={name} is none of {', '.join(Tracking.supported_backend)}")
        if (model_of(config) / "tokenizer_config.json").is_file():
            tokenizer = hf_tokenizer(str(model_of(config)))
            tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1"}], add_generation_prompt=True)
        arguments = server_arguments(config)
        asked = "vLLM"
        _build(engine_arguments(config, arguments), config)
    except Exception as error:  # verl's, Hydra's, vLLM's, and what their dataclasses raise
        if config.trainer.device != "cpu" and type(error).__name__ in ("RuntimeError", "AcceleratorError"):
            return  # of a device in trouble; the engine, which takes it, says so again if it is so there
        text = re.sub(r"\[type=.*| For further information visit .*|(Value error|Assertion failed), ", "", str(error))
        text = textwrap.shorten(text, LONGEST_REASON, placeholder="...").strip(" .") or type(error).__name__
        yield f"{text}: {asked} refuses it: correct what it names [config.{asked.lower()}]"


def server_arguments(config: DictConfig) -> dict[str, Any]:
    """vLLM's arguments for the first server of the first replica, by name, as verl makes them; None: not given."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.vllm_rollout import vllm_async_server

    from recipe.sam_dapo.rollout.server import SpeculationServer

    model = config.actor_rollout_ref.model
    rollout = config.actor_rollout_ref.rollout
    devices_of_node = config.trainer.n_gpus_per_node
    ranks = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    devices = min(ranks, devices_of_node)
    model_config = SimpleNamespace(
        local_path=str(model.path),
        trust_remote_code=model.trust_remote_code,
        lora=model.get("lora") or {},
        lora_rank=model.lora_rank,
    )
    server = object.__new__(SpeculationServer)  # as launch_server finds it, without Ray
    vars(server).update(
        config=omega_conf_to_dataclass(rollout),
        model_config=model_config,
        replica_rank=0,
        node_rank=0,
        gpus_per_node=devices,
        nnodes=max(1, ranks // devices_of_node),
        workers=[None] * devices,
        _master_address="127.0.0.1",
        _master_port=1,
        _dp_rpc_port=2,
        _disaggregation_role="null",
        _should_profile=lambda: False,
        _apply_quantization=lambda: (rollout.quantization, {}),  # verl's patches this process
    )
    # What comes after would start vLLM.
    stop = mock.patch.object(vllm_async_server, "build_cli_args_from_config", side_effect=InterruptedError)
    with stop as called, contextlib.suppress(InterruptedError):
        asyncio.run(server.launch_server())
    return dict(called.call_args.args[0])


def engine_arguments(config: DictConfig, arguments: dict[str, Any] | None = None) -> Any:
    """vLLM's AsyncEngineArgs, read by its server's parser from the command line that verl writes.

    Raises:
        ValueError: the parser refuses it.
    """
    from verl.workers.rollout.vllm_rollout.utils import build_cli_args_from_config
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        def error(self, message):
            raise ValueError(message)

    # Without the folder vLLM would look for a hub's model of that name.
    folder = model_of(config) if model_of(config).is_dir() else Path(__file__).parent
    line = ["--model", str(folder), *build_cli_args_from_config(arguments or server_arguments(config))]
    return AsyncEngineArgs.from_cli_args(make_arg_parser(Parser()).parse_args(line))


def _build(engine: Any, config: DictConfig) -> None:
    """Raise what vLLM, or this project's plugin in it, refuses when an engine starts."""
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    from sam.vllm import plugin

    plugin.check_lossless(engine)
    if current_platform.device_type == config.trainer.device and (model_of(config) / "config.json").is_file():
        # It would look at the model's class in a process that imports vLLM once more.
        with mock.patch.object(registry, "_run_in_subprocess", lambda function: function()):
            made = engine.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
        plugin.check_recurrent_state(made.model_config, getattr(made.speculative_config, "method", None))
