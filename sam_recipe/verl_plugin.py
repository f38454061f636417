"""What verl's own trainers get of this project: `hydra.searchpath=[pkg://sam.configs] +speculation=sam`.

verl loads this module with itself, in all its processes (entry point `verl.plugins`). Here it only gives OmegaConf what
`${sam:...}` stands for. Where such a value is read in the process that trains, verl is given this project's servers,
and its trainer shares text between replicas and logs `rollout/...`. Runs that do not ask for it are verl's own.
"""

import functools
import sys
from collections.abc import Callable

from omegaconf import DictConfig, OmegaConf

from sam.config import SpeculationConfig
from sam_recipe.launch import sharing

TRAINER = "verl.trainer.ppo.v1.trainer_base"


def resolved(config: DictConfig) -> SpeculationConfig:
    """The section `speculation` of a config, with sharing=replicas or none in place of auto.

    Raises:
        ValueError: an unknown key, a value outside its range, or an engine or trainer that it is not for.
    """
    engine, is_v1 = config.actor_rollout_ref.rollout.name, config.trainer.use_v1
    if engine != "vllm":
        raise ValueError(f"actor_rollout_ref.rollout.name={engine}: speculation drafts in vllm: set it to vllm")
    if not is_v1:
        raise ValueError(f"trainer.use_v1={is_v1}: speculation needs verl's V1 trainers: set it to true")
    section = OmegaConf.to_container(config.speculation, resolve=True)
    return sharing.resolve(config, SpeculationConfig.from_dict(section))


def _answer(name: str, *, _root_: DictConfig) -> DictConfig | None:
    """`${sam:speculative_config}`, null without speculation, and `${sam:settings}`."""
    from sam_recipe.launch.config import engine_arguments

    speculation = resolved(_root_)
    if TRAINER in sys.modules:
        _join_verl(sys.modules[TRAINER].PPOTrainer)
    value = speculation.to_dict() if name == "settings" else engine_arguments(_root_, speculation).get(name)
    return value and OmegaConf.create(value)


OmegaConf.register_new_resolver("sam", _answer, replace=True)


@functools.cache
def _join_verl(trainer_class: type) -> None:
    """Let verl's trainers start this project's servers, and do what it adds around three of their methods.

    verl has a registry of servers, but none of what its trainers log or do when they have started: can go when it has.
    """
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register("vllm", _replica_class)
    for name, around in (("init", _share_text), ("_validate", _forget_steps), ("_compute_metrics", _add_metrics)):
        setattr(trainer_class, name, _around(getattr(trainer_class, name), around))


def _around(original: Callable, around: Callable) -> Callable:
    @functools.wraps(original)
    def method(trainer, *arguments, **keywords):
        return around(lambda: original(trainer, *arguments, **keywords), trainer, *arguments)

    return method


def _replica_class() -> type:
    from sam_recipe.rollout.server import DraftingReplica

    return DraftingReplica


def _share_text(start: Callable, trainer) -> None:
    """Start workers and servers; then let drafters see each other's text, where they are to."""
    from sam_recipe.rollout import server

    start()
    trainer.sam_steps, trainer.sam_log = None, None  # an actor ends when nobody holds its handle
    if resolved(trainer.config).sharing == "replicas":
        trainer.sam_log = server.share_text(server.STARTED, sharing.needed_mib(trainer.config))


def _forget_steps(validate: Callable, trainer) -> dict[str, float]:
    """Validate, whose engine steps are not those of a training step's rollout."""
    from sam_recipe.rollout import server

    before = server.take_steps(server.STARTED)
    trainer.sam_steps = before if sum(map(len, before[0])) else None
    metrics = validate()
    server.take_steps(server.STARTED)
    return metrics


def _add_metrics(compute: Callable, trainer, batch, metrics: dict[str, float], *_) -> None:
    """verl's metrics, and those of the engine steps since the last call."""
    from sam_recipe.record import rollout_metrics
    from sam_recipe.rollout import server

    compute()
    (replicas, seconds), trainer.sam_steps = trainer.sam_steps or server.take_steps(server.STARTED), None
    if sum(map(len, replicas)):
        metrics.update(rollout_metrics(replicas, seconds, int(trainer.config.speculation.batch_size_threshold), 1))
