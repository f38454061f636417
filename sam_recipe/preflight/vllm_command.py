"""Asks verl and vLLM themselves, before anything is started, whether they take a config, and says it in their words.

verl loads what users bring, validates the config, and its `launch_server` writes vLLM's command line; vLLM's parser
reads it and, where the device and the model are there, builds the engine's config. For a run a process of its own asks:
the imports take 15 s of a core, and the process that starts a run must stay light. What was taken once is not asked
again.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from omegaconf import DictConfig, ListConfig, OmegaConf

from sam.config import CACHE
from sam_recipe.arguments import AGENT, AGENT_LOOPS, CODE, FILES, TOOLS, TURNS
from sam_recipe.launch import environment, versions
from sam_recipe.preflight.machine import first_line
from sam_recipe.preflight.settings import MODEL, ROLLOUT, entries, key_of, model_of

logger = logging.getLogger(__name__)

REPOSITORY = Path(__file__).resolve().parents[2]  # or the folder that packages are installed in
ACCEPTED = CACHE / "vllm_arguments"  # an empty file for all that verl and vLLM take together
LIMIT_SECONDS = 400.0  # of a machine whose cores others use too; 20 are enough on a free one
LONGEST_REASON = 300  # characters; some of vLLM's errors list every attention backend
ASK = "from sam_recipe.preflight import vllm_command; vllm_command.main()"
# What changes from run to run or is checked elsewhere, in actor_rollout_ref.
NOT_ASKED = (
    *("model.path", "rollout.seed", "rollout.router_config_path", "actor.data_loader_seed"),
    "rollout.engine_kwargs.vllm.additional_config.speculation",
)
CALLED = tuple(key for key in CODE if key != "data.custom_cls.path")


def taken_by_verl_and_vllm(config: DictConfig) -> Iterator[str]:
    """In about 20 s, or at once where the same was found good before. Where they cannot be asked a warning says so."""
    good = ACCEPTED / _fingerprint(config)
    if good.is_file():
        return
    said = _ask(config)
    if said == []:
        with contextlib.suppress(OSError):
            good.parent.mkdir(parents=True, exist_ok=True)
            good.touch()
    yield from said or []


def what_verl_and_vllm_say(config: DictConfig) -> Iterator[str]:
    """The same within this process, which imports verl and vLLM; without users' code."""
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.utils.config import validate_config

    try:
        validate_config(config, need_reference_policy(config), need_critic(config))
        arguments = server_arguments(config)
    except Exception as error:  # verl's, Hydra's, and what its dataclasses raise
        yield f"{_reason(error)}: verl refuses the config: correct what it names [config.verl]"
        return
    try:
        _build(engine_arguments(config, arguments), config)
    except Exception as error:
        # The argument that the error names, with - or _ or spaces.
        named = re.search(rf"\b({'|'.join(arguments).replace('_', '[-_ ]')})\b", str(error), re.IGNORECASE)
        name = re.sub("[- ]", "_", named[0]).lower() if named else None
        value = f"{key_of(name, config)}={arguments[name]}" if name else f"what {ROLLOUT} hands to vLLM"
        yield f"{value}: {_reason(error)}: vLLM refuses it: change it [vllm.arguments]"


def server_arguments(config: DictConfig) -> dict[str, Any]:
    """vLLM's arguments for the first server of the first replica, by name, as verl makes them; None: not given."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.vllm_rollout import vllm_async_server

    from sam_recipe.rollout.server import SpeculationServer

    model, rollout, trainer = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout, config.trainer
    ranks = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    lora = {"lora": model.get("lora") or {}, "lora_rank": model.lora_rank}
    server = object.__new__(SpeculationServer)  # as launch_server finds it, without Ray
    vars(server).update(
        config=omega_conf_to_dataclass(rollout),
        model_config=SimpleNamespace(local_path=str(model.path), trust_remote_code=model.trust_remote_code, **lora),
        replica_rank=0,
        node_rank=0,
        gpus_per_node=(devices := min(ranks, trainer.n_gpus_per_node)),
        nnodes=max(1, ranks // trainer.n_gpus_per_node),
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

    folder = model if (model := model_of(config)).is_dir() else REPOSITORY  # vLLM would look for a hub's of that name
    line = ["--model", str(folder), *build_cli_args_from_config(arguments or server_arguments(config))]
    return AsyncEngineArgs.from_cli_args(make_arg_parser(Parser()).parse_args(line))


def _build(engine: Any, config: DictConfig) -> None:
    """Raise what vLLM, or this project's plugin in it, refuses when an engine starts."""
    from vllm.platforms import current_platform
    from vllm.usage.usage_lib import UsageContext

    from sam.vllm import plugin, ranks
    from sam.vllm.paths import rows

    plugin.check_lossless(engine)
    if engine.load_format not in ("auto", "dummy", "safetensors"):
        from vllm.model_executor.model_loader import get_model_loader

        get_model_loader(engine.create_load_config())
    if current_platform.device_type != config.trainer.device or not (model_of(config) / "config.json").is_file():
        return
    made = engine.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    plugin.check_recurrent_state(made.model_config, getattr(made.speculative_config, "method", None))
    if made.scheduler_config.async_scheduling and config.speculation.method == "sam":
        ranks.check_async(made.parallel_config)
    if config.speculation.paths > 1:
        rows.check_engine(made)


def _reason(error: Exception) -> str:
    """In one line, in their words: argparse and pydantic say what they expected, Hydra where it was first."""
    text = " ".join((error.errors()[0]["msg"] if hasattr(error, "errors") else str(error)).split())
    text = re.sub(r"\[type=.*| For further information visit .*|(Value error|Assertion failed), ", "", text)
    known = " is none of the values that it knows" if isinstance(error, KeyError) else ""
    return textwrap.shorten(text, LONGEST_REASON, placeholder="...").strip(" .") + known


def users_code(config: DictConfig) -> Iterator[str]:
    """What verl says when it loads what users bring. Imports verl and runs their files, as processes of a run do."""
    try:
        from hydra.utils import get_object
        from verl.tools.function_tool import load_function_tools_from_path
        from verl.utils.dataset.rl_dataset import get_dataset_class
        from verl.utils.import_utils import import_external_libs, load_class_from_fqn, load_extern_object
    except ImportError:  # verl or a package of its is not here, which compatibility says
        return
    loads = {
        **dict.fromkeys(CALLED, load_extern_object),
        "data.custom_cls.path": lambda path, name: get_dataset_class(config.data),
        f"{AGENT}.agent_loop_manager_class": load_class_from_fqn,
        f"{MODEL}.external_lib": import_external_libs,
        AGENT_LOOPS: lambda path: [get_object(target) for _, target in entries(path, "", "name", "_target_")],
        TOOLS: lambda path: [get_object(name) for (name,) in entries(path, "tools", "class_name")],
        f"{TURNS}.function_tool_path": load_function_tools_from_path,
    }
    for key, load in loads.items():
        if not (value := OmegaConf.select(config, key)):
            continue
        name = [OmegaConf.select(config, CODE[key])] if key in CODE else []
        try:
            found = load(list(value) if isinstance(value, ListConfig) else value, *name)
            if key in CALLED and not callable(found):
                raise TypeError(f"{name[0]} is {found!r}, expected a function or class")
        except (Exception, SystemExit) as error:
            cause = error.__cause__ or error  # of verl's "Error loading module"
            said = f"{key}={value}" + "".join(f", {CODE[key]}={one}" for one in name)
            wrong = f"{type(cause).__name__}: {first_line(cause)}: verl would not find it"
            yield f"{said}: {wrong}: correct what the line names [code.missing]"


def _ask(config: DictConfig) -> list[str] | None:
    """The lines that a process of its own finds; None: it cannot be asked."""
    defaults = environment.OFFLINE | environment.FIRST_MODEL_RUNNER | {"VLLM_LOGGING_LEVEL": "ERROR"}
    if config.trainer.device == "cpu":
        defaults |= environment.CPU
    # It must find this package, and what users bring, as this process does.
    own = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in [str(REPOSITORY), *sys.path])}
    try:
        run = subprocess.run(
            [sys.executable, "-c", ASK], env=defaults | os.environ | own, input=OmegaConf.to_yaml(config),
            capture_output=True, text=True, timeout=LIMIT_SECONDS,
        )  # fmt: skip
        return json.loads(run.stdout.splitlines()[-1])
    except (subprocess.TimeoutExpired, OSError, IndexError, ValueError) as error:
        logger.warning("verl and vLLM could not be asked beforehand whether they take this config: %r", error)
        return None


def _fingerprint(config: DictConfig) -> str:
    """Of what the answer depends on; a model counts by its config.json."""
    asked = OmegaConf.masked_copy(config, ["actor_rollout_ref", "algorithm", "critic", "reward"])
    OmegaConf.set_struct(asked, False)
    for key in NOT_ASKED:
        OmegaConf.update(asked, f"actor_rollout_ref.{key}", None)
    brought = [str(OmegaConf.select(config, key)) for key in FILES]
    sizes = config.data.train_batch_size, config.trainer.n_gpus_per_node, config.trainer.nnodes, config.trainer.device
    packages = [versions.installed(name) for name in ("verl", "vllm", "vllm-ascend", "transformers")]
    variables = sorted((name, value) for name, value in os.environ.items() if name.startswith("VLLM_"))
    files = model_of(config) / "config.json", Path(__file__), *map(Path, brought)
    contents = [file.read_bytes() for file in files if file.is_file()]
    parts = OmegaConf.to_yaml(asked), brought, sizes, packages, variables, contents
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:32]


def main() -> None:
    """A config as YAML on stdin; on stdout the problems found, one line of JSON."""
    stdout, sys.stdout = sys.stdout, sys.stderr  # verl and vLLM log to stdout
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()  # it would import vLLM once more
    config = OmegaConf.create(sys.stdin.read())
    print(json.dumps([*users_code(config), *what_verl_and_vllm_say(config)]), file=stdout, flush=True)
