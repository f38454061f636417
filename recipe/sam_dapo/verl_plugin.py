"""What verl's own trainers get of this project: `hydra.searchpath=[pkg://sam.configs] +speculation=sam`, and the router
with `+routing=context` beside it.

verl loads this module with itself, in all its processes (sam/verl_door.py). Here it only gives OmegaConf what
`${sam:...}` stands for, and the recipe's runs a name (SESSION of recipe.sam_dapo.rollout). Where such a value is read
in the process that trains, and in the recipe's, verl is given this project's servers, and its trainer shares text
between replicas and logs `rollout/...`. Other runs are verl's own.
"""

import functools
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from ray.runtime_context import RuntimeContext

from recipe.sam_dapo import patches_of_verl  # noqa: F401 - registers what is replaced here
from recipe.sam_dapo.arguments import did_you_mean
from recipe.sam_dapo.launch import routing, sharing
from recipe.sam_dapo.rollout import SESSION
from sam.config import SpeculationConfig
from sam.patching import wrap
from sam.switch.step_cost import StepCost

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
    if "speculation" not in config:
        raise ValueError("routing is given without speculation: add +speculation=sam, or +speculation=off")
    if "routing" in config:
        routing.check(config)
    section = OmegaConf.to_container(config.speculation, resolve=True)
    return sharing.resolve(config, SpeculationConfig.from_dict(section))


def _answer(name: str, *, _root_: DictConfig) -> DictConfig | None:
    """`${sam:speculative_config}`, null without speculation, and `${sam:settings}`."""
    from recipe.sam_dapo.launch.config import engine_arguments

    speculation = resolved(_root_)
    if TRAINER in sys.modules:
        join_verl(sys.modules[TRAINER].PPOTrainer)
    value = speculation.to_dict() if name == "settings" else engine_arguments(_root_, speculation).get(name)
    return value and OmegaConf.create(value)


OmegaConf.register_new_resolver("sam", _answer, replace=True)


def refuse(error: object) -> None:
    """End the process with one line."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    sys.exit(2)


def check_words(words: Iterable[str]) -> None:
    """Refuse overrides of `speculation` keys that there are not, before Hydra does so in several lines.

    verl loads this module before Hydra composes, for which Hydra has no hook.
    """
    known = [field.name for field in fields(SpeculationConfig)]
    for word in words:
        if (found := re.match(r"[+~]*speculation\.([^.=@]+)=", word)) and found[1] not in known:
            meant = did_you_mean(found[1], known) or f"the keys are {', '.join(known)}"
            refuse(f"speculation.{found[1]} is unknown: {meant}")


class Check(Callback):
    """Hydra's callback that refuses a wrong `speculation` section in the process that was started, before Ray is:
    what it raised later would be the last of a hundred lines."""

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        try:
            speculation = resolved(config)
            if speculation.step_cost is not None:
                StepCost.load(Path(speculation.step_cost))
        except (ValueError, OmegaConfBaseException) as error:
            refuse(error)


check_words(sys.argv[1:])

if session := os.environ.get(SESSION):  # of a run of the recipe
    wrap(RuntimeContext, "get_job_id", "name_job", lambda get, context: get(context) + session)


@functools.cache
def join_verl(trainer_class: type) -> None:
    """Let verl's trainers start this project's servers, and do what it adds around five of their methods."""
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    RolloutReplicaRegistry.register("vllm", replica_class)
    for name, around in {
        "init": _start,
        "get_llm_client": _client,
        "step": _take_steps,
        "_validate": _forget_steps,
        "_compute_metrics": _add_metrics,
    }.items():
        wrap(trainer_class, name, "join_trainers", functools.partial(_call_around, around))


def _call_around(around: Callable, original: Callable, trainer, *arguments, **keywords) -> Any:
    return around(lambda: original(trainer, *arguments, **keywords), trainer, *arguments)


def replica_class() -> type:
    """Imported when the servers start, not before the workers do: vLLM takes seconds."""
    from recipe.sam_dapo.rollout.server import SpeculationReplica

    return SpeculationReplica


def _start(start: Callable, trainer) -> None:
    """Start workers, servers and router; then let drafters see each other's text, where they are to."""
    from recipe.sam_dapo.rollout import router, server

    if routing.is_routed(trainer.config):
        routing.connect(trainer.config)
        router.write_config(trainer.config)
    start()
    trainer.sam_steps, trainer.sam_routing, trainer.sam_log = [], {}, None  # an actor ends when nobody holds its handle
    if resolved(trainer.config).sharing == "replicas":
        trainer.sam_log = server.share_text(sharing.needed_mib(trainer.config))


def _client(get: Callable, trainer) -> Any:
    """verl's client of the servers, or the one that tells the recipe's router how long responses are."""
    from recipe.sam_dapo.rollout.client import RoutedClient

    is_routed = routing.is_routed(trainer.config)
    return trainer.llm_server_manager.get_client(client_cls=RoutedClient) if is_routed else get()


def _take_steps(step: Callable, trainer, *_) -> Any:
    """Train a step; then take the engine steps since the last one, before the weights change.

    An asynchronous trainer's are those of all requests between two weight syncs, whichever step trains on them.
    """
    from recipe.sam_dapo.rollout import router, server

    router.read_history(trainer)
    batch = step()
    trainer.sam_steps, trainer.sam_routing = server.take_steps(), router.take_metrics(trainer)
    return batch


def _forget_steps(validate: Callable, trainer) -> dict[str, float]:
    """Validate, whose engine steps are not those of a training step's rollout."""
    from recipe.sam_dapo.rollout import router, server

    metrics = validate()
    server.take_steps()
    router.take_metrics(trainer)
    return metrics


def _add_metrics(compute: Callable, trainer, batch, metrics: dict[str, float], *_) -> None:
    """verl's metrics, and those of the engine steps that the training step took."""
    from recipe.sam_dapo.record import rollout_metrics

    compute()
    metrics.update(trainer.sam_routing)
    if trainer.sam_steps:
        replicas, seconds = map(list, zip(*trainer.sam_steps, strict=True))
        metrics.update(rollout_metrics(replicas, seconds, int(trainer.config.speculation.batch_size_threshold)))
