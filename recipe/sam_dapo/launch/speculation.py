"""What the section `speculation` of a config gives vLLM's engines, in a run of the recipe and in verl's own scripts."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipe.sam_dapo.launch import routing, sharing
from sam.config import SpeculationConfig

# What sam/configs/verl_engine.yaml names of the recipe: Hydra's callback, and verl's class of agent loops.
CLASSES = {
    "check": "recipe.sam_dapo.verl_plugin.Check",
    "agent_loop_manager": "recipe.sam_dapo.rollout.agent_loop.SeededManager",
}


def section_of(config: DictConfig) -> SpeculationConfig:
    """The section as it stands; ValueError: an unknown key, or a value outside its range."""
    return SpeculationConfig.from_dict(OmegaConf.to_container(config.speculation, resolve=True))


def resolved(config: DictConfig) -> SpeculationConfig:
    """The section of a config of verl's, with sharing=replicas or none in place of auto.

    Raises:
        ValueError: as `section_of`, or an engine or trainer that it is not for.
    """
    engine = config.actor_rollout_ref.rollout.name
    if engine != "vllm":
        raise ValueError(f"actor_rollout_ref.rollout.name={engine}: speculation drafts in vllm: set it to vllm")
    is_v1 = config.trainer.use_v1
    if not is_v1:
        raise ValueError(f"trainer.use_v1={is_v1}: speculation needs verl's V1 trainers: set it to true")
    if "speculation" not in config:
        raise ValueError("routing is given without speculation: add +speculation=sam, or +speculation=off")
    if "routing" in config:
        routing.check(config)
    return sharing.resolve(config, section_of(config))


def value_of(name: str, *, _root_: DictConfig) -> DictConfig | str | None:
    """What `${sam:name}` stands for in a config of verl's: a name of CLASSES, `settings`, all of the section, or
    `speculative_config` of vLLM, null without speculation. It reads the config and does nothing else.

    Raises:
        ValueError: as `resolved`.
    """
    if name in CLASSES:
        return CLASSES[name]
    speculation = resolved(_root_)
    if name == "settings":
        return OmegaConf.create(speculation.to_dict())
    value = engine_arguments(_root_, speculation).get(name)
    return None if value is None else OmegaConf.create(value)


OmegaConf.register_new_resolver("sam", value_of, replace=True)


def asks_for_it(config: DictConfig) -> bool:
    """Whether a config of verl's has what sam/configs/verl_engine.yaml sets."""
    return "speculation" in config and reaches_engine(config.actor_rollout_ref.rollout)


def reaches_engine(rollout: Mapping) -> bool:
    """Whether the engines of a `rollout` section, or of a reward model's or a teacher's, are given such settings."""
    engine = (rollout.get("engine_kwargs") or {}).get("vllm") or {}
    return "speculation" in (engine.get("additional_config") or {})


def with_absolute_paths(speculation: SpeculationConfig, run_directory: Path) -> SpeculationConfig:
    """The settings for every process of a run, wherever it starts; a history without a path lies with the run."""
    history_path = speculation.history_path
    if speculation.method in sharing.METHODS and speculation.scope == "history":
        history_path = str(Path(history_path or run_directory / "history").absolute())
    draft_model = speculation.draft_model
    if draft_model:
        draft_model = str(Path(draft_model).expanduser().absolute())
    corpus = tuple(str(Path(path).expanduser().absolute()) for path in speculation.corpus)
    return replace(speculation, history_path=history_path, draft_model=draft_model, corpus=corpus)


def engine_arguments(config: DictConfig, speculation: SpeculationConfig) -> dict[str, Any]:
    """What vLLM's engines are given, as SpeculationConfig.vllm_arguments."""
    rollout = config.actor_rollout_ref.rollout
    stages = rollout.get("pipeline_model_parallel_size") or 1
    setting = rollout.engine_kwargs.vllm.get("async_scheduling")
    return speculation.vllm_arguments(speculation.schedules_asynchronously(config.trainer.device, stages, setting))
