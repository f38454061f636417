"""Composes a config of configs/ on top of verl's own, without importing verl."""

import importlib.util
import re
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from recipe.sam_dapo.arguments import CONFIGS, FREE_SECTIONS, check_values, connect_users_code, did_you_mean, folder_of
from recipe.sam_dapo.launch import routing, sharing, speculation
from recipe.sam_dapo.record.settings import differences
from sam.switch.step_cost import StepCost

UNKNOWN = re.compile("Could not override '(.+?)'")  # Hydra of a key that a config has not, and then advises a `+`


class ConfigError(ValueError):
    """The configuration is wrong; the message is one line that says what to change, with a code of preflight's."""


def compose_config(config_name: str, overrides: list[str]) -> DictConfig:
    """Compose, check the `speculation` section and connect the recipe's parts to verl's keys; ConfigError: a mistake.

    A `config_name` with a folder in front is a user's own config, which may compose this project's.
    """
    try:
        config = _composed(config_name, overrides)
        check_values(config)
        connect(config)
        OmegaConf.resolve(config)
    except ConfigError:
        raise
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(_one_line(error, overrides)) from error
    return config


def _composed(config_name: str, overrides: list[str]) -> DictConfig:
    """What Hydra makes of a config and overrides."""
    folder = folder_of(config_name)
    name = Path(config_name).name.removesuffix(".yaml")
    if not (folder / f"{name}.yaml").is_file():
        pattern = "dapo_*.yaml" if folder == CONFIGS else "*.yaml"
        known = ", ".join(sorted(path.stem for path in folder.glob(pattern))) or "none"
        raise ConfigError(f"config {config_name!r} is unknown: expected one of {known} [config.override]")
    GlobalHydra.instance().clear()
    search = f"hydra.searchpath=['file://{CONFIGS}','{verl_configs()}','pkg://sam.configs']"
    for override in overrides:  # of a new key verl would know nothing
        if override[:1] in ("+", "~") and not override[1:].lstrip("+").startswith(FREE_SECTIONS):
            raise ConfigError(f"{override}: {name} has all keys of a run: leave it out [config.value]")
    with initialize_config_dir(str(folder), version_base="1.3", job_name=name):
        try:
            config = compose(name, [search, *overrides])
        except HydraException as error:
            key = _unknown_key(error)
            if key is None:
                raise
            content = OmegaConf.to_container(compose(name, [search]))
            known = [*content, *differences({}, content)]  # sections, and keys with dots, which begin alike
            meant = did_you_mean(key, known, 0.8) or "check its spelling"
            raise ConfigError(f"{key} does not exist in this config: {meant} [config.override]") from error
    config.config_name = name
    return config


def _unknown_key(error: HydraException) -> str | None:
    """The key that Hydra does not find; None where a `+` helps, which is what Hydra says, or it is another mistake."""
    unknown = UNKNOWN.match(str(error))
    if unknown is None or unknown[1].startswith(FREE_SECTIONS[:-1]):
        return None
    return unknown[1]


def micro_batch(largest: int, prompts: int, *, _root_: DictConfig) -> int:
    """`${micro_batch:LARGEST,PROMPTS}` of a config: responses that a device computes at once, at most `largest`, which
    divide its share of the responses to `prompts` prompts, whatever the number of devices."""
    devices = _root_.trainer.nnodes * _root_.trainer.n_gpus_per_node
    share = prompts * _root_.actor_rollout_ref.rollout.n // devices
    if not share:
        return largest
    return max(size for size in range(1, largest + 1) if share % size == 0)


OmegaConf.register_new_resolver("micro_batch", micro_batch, replace=True)


def connect(config: DictConfig) -> None:
    """Check what speculation and routing say, give them their final values, and point verl's keys at the router's file
    and the user's; everything else is in the YAML files. ValueError: a mistake."""
    section = speculation.section_of(config)
    if section.step_cost is not None:
        StepCost.load(Path(section.step_cost))  # ValueError: it cannot be read
    with open_dict(config):
        config.run_dir = str(Path(config.run_dir).absolute())
        routing.connect(config)
        section = speculation.with_absolute_paths(section, Path(config.run_dir))
        config.speculation = sharing.resolve(config, section).to_dict()
        add_users_keys(config)
        connect_users_code(config)


def add_users_keys(config: DictConfig) -> None:
    """Give engines what a user sets beside this project's own keys. ValueError: there is a value in place of keys."""
    vllm = config.actor_rollout_ref.rollout.engine_kwargs.vllm
    for key, value in speculation.engine_arguments(config, speculation.section_of(config)).items():
        users = vllm.get(key) or {}
        if not isinstance(users, DictConfig | dict):
            raise ValueError(f"actor_rollout_ref.rollout.engine_kwargs.vllm.{key}={users}: expected a dictionary")
        vllm[key] = {**users, **value}
    if vllm.get("speculative_config") is None:  # as stock vLLM is started
        vllm.pop("speculative_config", None)


def verl_configs() -> str:
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("verl is not installed: install requirements/*.txt [package.version]")
    return f"file://{Path(spec.submodule_search_locations[0]) / 'trainer' / 'config'}"


def _one_line(error: Exception, overrides: list[str]) -> str:
    """What is wrong, with preflight's code."""
    if "NoneType" in str(error):
        for override in overrides:
            if override.endswith("=null"):
                return f"{override}: expected keys below it: change it [config.value]"
    is_hydras = isinstance(error, HydraException | OmegaConfBaseException)
    code = "config.override" if is_hydras else "config.value"
    return f"{_message(str(error), overrides)} [{code}]"


def _message(text: str, overrides: list[str]) -> str:
    """Hydra's messages have several lines, the cause first."""
    for override in overrides:
        if "=" not in override and override[0] != "~":
            return f"{override}: expected KEY=VALUE, such as speculation=off"
    cause = text.split("Config search path:")[0]
    choice = re.search(r"Could not find '(\w+)/(\w+)'.*Available options in '\w+':(.*)", cause, re.DOTALL)
    if choice:
        expected = ", ".join(sorted({*choice[3].split()} - {"knobs"}))
        return f"{choice[1]}={choice[2]} is unknown: expected one of {expected}"
    return "; ".join([line.strip() for line in cause.splitlines() if line.strip()][:8])
