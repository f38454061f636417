"""Composes a config of configs/ on top of verl's own, without importing verl."""

import difflib
import importlib.util
import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from sam.config import SpeculationConfig
from sam.switch.step_cost import StepCost
from sam_recipe.arguments import CONFIGS, FREE_SECTIONS, check_values, connect_users_code, folder_of
from sam_recipe.launch import routing, sharing


class ConfigError(ValueError):
    """The configuration is wrong; the message is one line that says what to change, with a code of preflight's."""


def compose_config(config_name: str, overrides: list[str]) -> DictConfig:
    """Compose, check the `speculation` section and connect the recipe's parts to verl's keys.

    A `config_name` with a folder in front is a user's own config, which may compose this project's.

    Raises:
        ConfigError: unknown config, group choice or key, a speculation value out of range, or a number out of range.
    """
    folder, name = folder_of(config_name), Path(config_name).name.removesuffix(".yaml")
    if not (folder / f"{name}.yaml").is_file():
        known = ", ".join(sorted(path.stem for path in folder.glob("dapo_*.yaml" if folder == CONFIGS else "*.yaml")))
        raise ConfigError(f"config {config_name!r} is unknown: expected one of {known or 'none'} [config.override]")
    GlobalHydra.instance().clear()
    path = ",".join(f"'{one}'" for one in (f"file://{CONFIGS}", verl_configs(), "pkg://sam.configs"))
    try:
        _refuse_unknown_additions(name, overrides)
        with initialize_config_dir(str(folder), version_base="1.3", job_name=name):
            config = compose(name, [f"hydra.searchpath=[{path}]", *overrides])
        config.config_name = name
        check_values(config)
        speculation = SpeculationConfig.from_dict(OmegaConf.to_container(config.speculation, resolve=True))
        _check_files(speculation)
        with open_dict(config):
            connect(config, speculation)
            connect_users_code(config)
        routing.connect(config)
        OmegaConf.resolve(config)
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        emptied = [override for override in overrides if override.endswith("=null")]
        if emptied and ("NoneType" in str(error) or "primitive type" in str(error)):  # a section or a choice
            raise ConfigError(f"{emptied[0]}: expected keys below it: change it [config.value]") from error
        code = "config.override" if isinstance(error, HydraException | OmegaConfBaseException) else "config.value"
        raise ConfigError(f"{_one_line(error)} [{code}]") from error
    return config


def micro_batch(largest: int, prompts: int, *, _root_: DictConfig) -> int:
    """`${micro_batch:LARGEST,PROMPTS}` of a config: responses that a device computes at once, at most `largest`.

    The most that divide the device's share of the responses to `prompts` prompts, whatever the number of devices.
    """
    trainer, samples = _root_.trainer, _root_.actor_rollout_ref.rollout.n
    share = prompts * samples // (trainer.nnodes * trainer.n_gpus_per_node)
    return max((size for size in range(1, largest + 1) if share and share % size == 0), default=largest)


OmegaConf.register_new_resolver("micro_batch", micro_batch, replace=True)


def connect(config: DictConfig, speculation: SpeculationConfig) -> None:
    """Point verl's keys at the recipe's code; everything else is in the YAML files."""
    rollout = config.actor_rollout_ref.rollout
    config.run_dir = str(Path(config.run_dir).absolute())
    if speculation.method in sharing.METHODS and speculation.scope == "history":
        folder = speculation.history_path or Path(config.run_dir) / "history"
        speculation = replace(speculation, history_path=str(Path(folder).absolute()))
    if speculation.draft_model:
        speculation = replace(speculation, draft_model=str(Path(speculation.draft_model).expanduser().absolute()))
    speculation = sharing.resolve(config, speculation)
    config.speculation = speculation.to_dict()
    own = engine_arguments(config, speculation)
    for key in ("additional_config", "compilation_config", "kv_transfer_config", "speculative_config"):
        users = rollout.engine_kwargs.vllm.get(key) or {}
        with suppress(ValueError):  # vLLM takes JSON too
            users = json.loads(users) if isinstance(users, str) else users
        if not isinstance(users, DictConfig | dict):
            raise ValueError(f"actor_rollout_ref.rollout.engine_kwargs.vllm.{key}={users}: expected a dictionary")
        if key in own:
            rollout.engine_kwargs.vllm[key] = {**users, **own[key]}


def engine_arguments(config: DictConfig, speculation: SpeculationConfig) -> dict[str, Any]:
    """What speculation gives vLLM's engines in a config of verl's, as SpeculationConfig.vllm_arguments."""
    rollout = config.actor_rollout_ref.rollout
    stages = rollout.get("pipeline_model_parallel_size") or 1
    setting = rollout.engine_kwargs.vllm.get("async_scheduling")
    of_engine = stages, setting, rollout.tensor_model_parallel_size
    return speculation.vllm_arguments(speculation.schedules_asynchronously(config.trainer.device, *of_engine))


def _check_files(speculation: SpeculationConfig) -> None:
    """Raise ValueError unless the files that speculation names can be read."""
    key = "corpus"
    try:
        if speculation.corpus is not None:
            from sam.corpus import load_corpus  # numba takes a second to import, few runs have a corpus

            load_corpus(Path(speculation.corpus))
        key = "step_cost"
        if speculation.step_cost is not None:
            StepCost.load(Path(speculation.step_cost))
    except ValueError as error:
        raise ValueError(f"speculation.{key}: {error}") from error


def _refuse_unknown_additions(config_name: str, overrides: list[str]) -> None:
    """Hydra accepts any new key with `+`, which verl would ignore silently, and leaves out any with `~`."""
    for override in overrides:
        key = override.lstrip("+~").split("=", 1)[0]
        if override.startswith("~") and not key.startswith(FREE_SECTIONS):
            raise ConfigError(f"{override}: a run needs all keys of its config: leave it in the config [config.value]")
        if override.startswith("+") and not key.startswith(FREE_SECTIONS):
            said = f"{key} is unknown to {config_name} and would be ignored: check its spelling"
            raise ConfigError(f"{said} [config.unknown_key]")


def verl_configs() -> str:
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        install = "run bash scripts/test.sh or install requirements/*.txt"
        raise ConfigError(f"verl is not installed: {install} [package.version]")
    return f"file://{Path(spec.submodule_search_locations[0]) / 'trainer' / 'config'}"


def _one_line(error: Exception) -> str:
    """Hydra's messages have several lines, the cause first, and advise a `+`, which helps in FREE_SECTIONS alone."""
    message = str(error).split("Config search path:")[0]
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    if found := re.search(r"Could not find '(.+)/(.+)'$", message, re.MULTILINE):
        choices = [line for line in lines[2:] if line != "knobs"]  # which the choices share
        return f"{found[1]}={found[2]} is unknown: expected one of {', '.join(choices)}"
    found = re.match("Could not override '(.+)'", message)
    if found is None or (found[1].startswith(FREE_SECTIONS) and not found[1].startswith("speculation")):
        return "; ".join(lines[:8])
    if not isinstance(cause := error.__cause__, OmegaConfBaseException):
        return f"{found[1]} is no choice of this config: leave it out"
    key = cause.full_key or found[1]  # as far as the first part that does not exist
    path, dot, name = key.rpartition(".")
    keys = map(str, cause.parent_node) if isinstance(cause.parent_node, DictConfig) else []
    nearest = [path + dot + one for one in difflib.get_close_matches(name, keys)]
    return f"{key} does not exist: " + (f"did you mean {' or '.join(nearest)}?" if nearest else "check its spelling")
