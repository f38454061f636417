"""Keys and environment variables that nothing reads: verl ignores unknown keys, a misspelt variable has no effect."""

import functools
import importlib.util
import inspect
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from recipe.arguments import FREE_SECTIONS
from recipe.launch.config import verl_configs
from recipe.preflight.device_memory import uses_megatron
from recipe.preflight.problem import Problem, did_you_mean

# This recipe's own.
OWN = (
    *("assets", "assets_command", "config_name", "drafters", "machine", "routing", "run_dir", "seed", "speculation"),
    "watchdog",
)
# Whose unknown keys others refuse: dataclasses of verl's, vLLM's argument parser, ray.init; or that are handed on to
# functions of the recipe's.
CHECKED_ELSEWHERE = (*FREE_SECTIONS, *(f"actor_rollout_ref.{part}" for part in ("actor", "ref", "rollout")))

PREFIXES = ("HCC", "HCL", "VLLM_", "ASCEND_", "RAY_EXPERIMENTAL_NOSET_", "TASK_QUEUE_", "CPU_AFFINITY_")
# HCCL's and CANN's documented ones that training and inference set; there is no list of them to be read here.
KNOWN = set(
    """
    HCCL_ALGO HCCL_ASYNC_ERROR_HANDLING HCCL_BUFFSIZE HCCL_CONNECT_TIMEOUT HCCL_DETERMINISTIC HCCL_EVENT_TIMEOUT
    HCCL_EXEC_TIMEOUT HCCL_HOST_SOCKET_PORT_RANGE HCCL_IF_BASE_PORT HCCL_IF_IP HCCL_INTRA_PCIE_ENABLE
    HCCL_INTRA_ROCE_ENABLE HCCL_NPU_SOCKET_PORT_RANGE HCCL_OP_EXPANSION_MODE HCCL_RDMA_RETRY_CNT HCCL_RDMA_SL
    HCCL_RDMA_TC HCCL_RDMA_TIMEOUT HCCL_SOCKET_FAMILY HCCL_SOCKET_IFNAME HCCL_WHITELIST_DISABLE HCCL_WHITELIST_FILE
    ASCEND_AICPU_PATH ASCEND_GLOBAL_EVENT_ENABLE ASCEND_GLOBAL_LOG_LEVEL ASCEND_HOME_PATH ASCEND_LAUNCH_BLOCKING
    ASCEND_OPP_PATH ASCEND_PROCESS_LOG_PATH ASCEND_RT_VISIBLE_DEVICES ASCEND_SLOG_PRINT_TO_STDOUT ASCEND_TOOLKIT_HOME
    RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES
    TASK_QUEUE_ENABLE CPU_AFFINITY_CONF
    """.split()
)
ALIKE = 0.85  # difflib's ratio from which a name counts as a misspelling of another


def key_problems(config: DictConfig) -> Iterator[Problem]:
    """Keys that verl does not know, and values of another type than verl's own."""
    verls = {name: value for name, value in OmegaConf.to_container(config).items() if name not in OWN}
    yield from _unknown(verls, verl_defaults("megatron" if uses_megatron(config) else "dp"), "")


@functools.cache
def verl_defaults(engine: str) -> dict:
    """verl's own ppo_trainer, every key of it."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(verl_configs().removeprefix("file://"), version_base="1.3"):
        return OmegaConf.to_container(compose("ppo_trainer", [f"model_engine={engine}"]), resolve=True)


def _unknown(found: dict, known: dict, path: str) -> Iterator[Problem]:
    for name in sorted(known.keys() - found.keys()):
        yield Problem("config.value", f"{path}{name} is not there", "leave it in the config")
    for name, value in found.items():
        key = f"{path}{name}"
        if name not in known:
            if not key.startswith(CHECKED_ELSEWHERE):
                yield Problem("config.unknown_key", key, did_you_mean(name, known))
        elif expected := _other_type(value, known[name]):
            yield Problem("config.value", f"{key}={value}", f"expected {expected}")
        elif isinstance(value, dict) and isinstance(known[name], dict) and known[name]:
            yield from _unknown(value, known[name], f"{key}.")


def _other_type(value: Any, default: Any) -> str | None:
    """What is expected in place of a value of another type than verl's default, which may be null."""
    if value == "???" != default:
        return "a value"
    if default is None or (value is None and not isinstance(default, dict)):
        return None
    if isinstance(default, bool):
        return None if isinstance(value, bool) else "true or false"
    if isinstance(default, int | float):
        return None if type(value) in (int, float) else "a number"
    if isinstance(default, dict):
        return None if isinstance(value, dict) else "keys below it"
    return "text" if type(value) in (bool, int, float) or isinstance(value, dict) else None


def ray_problems(config: DictConfig) -> Iterator[Problem]:
    """Of what is handed to ray.init, whose import takes a second."""
    import ray

    known = inspect.signature(ray.init).parameters
    for name in config.ray_kwargs.ray_init:
        if name not in known and not name.startswith("_"):  # Ray's own underscored keywords are not in its signature
            yield Problem("config.ray_init", f"ray_kwargs.ray_init.{name}", did_you_mean(name, known))


def variable_problems(_: DictConfig | None = None, environment: Mapping[str, str] = os.environ) -> Iterator[Problem]:
    known = set(KNOWN)
    for spec in filter(None, map(importlib.util.find_spec, ("vllm", "vllm_ascend"))):  # their envs.py, not imported
        if spec.origin and (path := Path(spec.origin).with_name("envs.py")).is_file():
            known.update(re.findall(r'"([A-Z][A-Z0-9_]+)"', path.read_text()))
    for name in sorted(name for name in environment if name.startswith(PREFIXES) and name not in known):
        if remedy := did_you_mean(name, known, ALIKE):
            yield Problem("environment.misspelt", name, remedy)
