"""Composes a config of configs/ on top of verl's own, without importing verl."""

import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from recipe.sam_dapo.arguments import CONFIGS, FREE_SECTIONS, check_values, connect_users_code, did_you_mean, folder_of
from recipe.sam_dapo.launch import routing, sharing
from recipe.sam_dapo.record import differences
from sam.config import SpeculationConfig
from sam.switch.step_cost import StepCost

UNKNOWN = re.compile("Could not override '(.+?)'")  # Hydra of a key that a config has not, and then advises a `+`


class ConfigError(ValueError):
    """The configuration is wrong; the message is one line that says what to change, with a code of preflight's."""


def compose_config(config_name: str, overrides: list[str]) -> DictConfig:
    """Compose, check the `speculation` section and connect the recipe's parts to verl's keys; ConfigError: a mistake.

    A `config_name` with a folder in front is a user's own config, which may compose this project's.
    """
    folder, name = folder_of(config_name), Path(config_name).name.removesuffix(".yaml")
    if not (folder / f"{name}.yaml").is_file():
        known = ", ".join(sorted(path.stem for path in folder.glob("dapo_*.yaml" if folder == CONFIGS else "*.yaml")))
        raise ConfigError(f"config {config_name!r} is unknown: expected one of {known or 'none'} [config.override]")
    GlobalHydra.instance().clear()
    path = ",".join(f"'{one}'" for one in (f"file://{CONFIGS}", verl_configs(), "pkg://sam.configs"))
    try:
        for override in overrides:  # of a new key verl would know nothing
            if override[:1] in ("+", "~") and not override[1:].lstrip("+").startswith(FREE_SECTIONS):
                raise ConfigError(f"{override}: {name} has all keys of a run: leave it out [config.value]")
        search = f"hydra.searchpath=[{path}]"
        with initialize_config_dir(str(folder), version_base="1.3", job_name=name):
            try:
                config = compose(name, [search, *overrides])
            except HydraException as error:
                if not (found := UNKNOWN.match(str(error))) or found[1].startswith(FREE_SECTIONS[:-1]):
                    raise
                content = OmegaConf.to_container(compose(name, [search]))
                known = [*content, *differences({}, content)]  # sections, and keys with dots, which begin alike
                meant = did_you_mean(found[1], known, 0.8) or "check its spelling"
                raise ConfigError(f"{found[1]} does not exist in this config: {meant} [config.override]") from error
        config.config_name = name
        check_values(config)
        speculation = SpeculationConfig.from_dict(OmegaConf.to_container(config.speculation, resolve=True))
        if speculation.step_cost is not None:
            StepCost.load(Path(speculation.step_cost))  # ValueError: it cannot be read
        with open_dict(config):
            connect(config, speculation)
            connect_users_code(config)
        routing.connect(config)
        OmegaConf.resolve(config)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        if (emptied := [one for one in overrides if one.endswith("=null")]) and "NoneType" in str(error):
            raise ConfigError(f"{emptied[0]}: expected keys below it: change it [config.value]") from error
        code = "config.override" if isinstance(error, HydraException | OmegaConfBaseException) else "config.value"
        raise ConfigError(f"{_one_line(error, overrides)} [{code}]") from error
    return config


def micro_batch(largest: int, prompts: int, *, _root_: DictConfig) -> int:
    """`${micro_batch:LARGEST,PROMPTS}` of a config: responses that a device computes at once, at most `largest`, which
    divide its share of the responses to `prompts` prompts, whatever the number of devices."""
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
    corpus = tuple(str(Path(path).expanduser().absolute()) for path in speculation.corpus)
    speculation = sharing.resolve(config, replace(speculation, corpus=corpus))
    config.speculation = speculation.to_dict()
    for key, value in engine_arguments(config, speculation).items():
        users = rollout.engine_kwargs.vllm.get(key) or {}
        if not isinstance(users, DictConfig | dict):
            raise ValueError(f"actor_rollout_ref.rollout.engine_kwargs.vllm.{key}={users}: expected a dictionary")
        rollout.engine_kwargs.vllm[key] = {**users, **value}


def engine_arguments(config: DictConfig, speculation: SpeculationConfig) -> dict[str, Any]:
    """What speculation gives vLLM's engines in a config of verl's, as SpeculationConfig.vllm_arguments."""
    rollout = config.actor_rollout_ref.rollout
    stages = rollout.get("pipeline_model_parallel_size") or 1
    setting = rollout.engine_kwargs.vllm.get("async_scheduling")
    return speculation.vllm_arguments(speculation.schedules_asynchronously(config.trainer.device, stages, setting))


def verl_configs() -> str:
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("verl is not installed: install requirements/*.txt [package.version]")
    return f"file://{Path(spec.submodule_search_locations[0]) / 'trainer' / 'config'}"


def _one_line(error: Exception, overrides: list[str]) -> str:
    """Hydra's messages have several lines, the cause first."""
    message = str(error).split("Config search path:")[0]
    if wrong := next((one for one in overrides if "=" not in one and one[0] != "~"), None):
        return f"{wrong}: expected KEY=VALUE, such as speculation=off"
    if found := re.search(r"Could not find '(\w+)/(\w+)'.*Available options in '\w+':(.*)", message, re.DOTALL):
        choices = sorted({*found[3].split()} - {"knobs"})
        return f"{found[1]}={found[2]} is unknown: expected one of {', '.join(choices)}"
    return "; ".join([line.strip() for line in message.splitlines() if line.strip()][:8])
