"""Keys of the composed config that nothing reads: verl ignores unknown ones, and Hydra lets YAML files add them."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Iterator

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from recipe.launch.config import verl_configs
from recipe.preflight.device_memory import uses_megatron
from recipe.preflight.problem import Problem

# This recipe's own.
OWN = ("assets", "config_name", "run_dir", "seed", "speculation", "watchdog")
# Checked by others: dataclasses of verl's that refuse an unknown key, vLLM's argument parser, ray.init; or handed on to
# functions of the recipe's.
CHECKED_ELSEWHERE = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.model.override_config",
    "actor_rollout_ref.ref",
    "actor_rollout_ref.rollout",
    "data.apply_chat_template_kwargs",
    "ray_kwargs.ray_init",
    "reward.reward_kwargs",
    "trainer.v1.sampler.sampler_kwargs",
)

STRATEGIES = ("fsdp", "fsdp2", "megatron")


def find_problems(config: DictConfig) -> Iterator[Problem]:
    strategy, rollout = config.actor_rollout_ref.actor.strategy, config.actor_rollout_ref.rollout.name
    if strategy not in STRATEGIES:
        yield Problem(
            "config.strategy",
            f"actor.strategy={strategy}: expected one of {', '.join(STRATEGIES)}; choose it with training=...",
        )
    if rollout != "vllm":
        yield Problem(
            "config.engine", f"rollout.name={rollout}: expected vllm, whose drafter and sampler this recipe replaces"
        )
    for key in ("project_name", "experiment_name"):
        if not isinstance(name := config.trainer[key], str):
            yield Problem(
                "config.name", f"trainer.{key}={name}: wandb takes texts only: trainer.{key}=run_{name}, for example"
            )
    verls = {name: value for name, value in OmegaConf.to_container(config).items() if name not in OWN}
    yield from _unknown(verls, verl_defaults("megatron" if uses_megatron(config) else "dp"), "")


@functools.cache
def verl_defaults(engine: str) -> dict:
    """verl's own ppo_trainer, every key of it."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(verl_configs().removeprefix("file://"), version_base="1.3"):
        return OmegaConf.to_container(compose("ppo_trainer", [f"model_engine={engine}"]))


def _unknown(found: dict, known: dict, path: str) -> Iterator[Problem]:
    for name, value in found.items():
        key = f"{path}{name}"
        if key in CHECKED_ELSEWHERE:
            continue
        if name not in known:
            yield Problem(
                "config.unknown_key", f"{key} is unknown to verl 0.9.1 and would be ignored: {_meant(name, known)}"
            )
        elif isinstance(value, dict) and isinstance(known[name], dict) and known[name]:
            yield from _unknown(value, known[name], f"{key}.")


def ray_problems(config: DictConfig) -> Iterator[Problem]:
    """Of what is handed to ray.init, whose import takes a second."""
    import ray

    known = dict(inspect.signature(ray.init).parameters)
    for name in config.ray_kwargs.ray_init:
        # Ray's own underscored keywords are not in its signature.
        if name not in known and not name.startswith("_"):
            yield Problem(
                "config.ray_init", f"ray_kwargs.ray_init.{name} is unknown to ray.init: {_meant(name, known)}"
            )


def _meant(name: str, known: dict) -> str:
    meant = difflib.get_close_matches(str(name), map(str, known), 1)
    return f"did you mean {meant[0]}?" if meant else "remove it from the config"
