"""What verl's own trainers get of this project: `hydra.searchpath=[pkg://sam.configs] +speculation=sam`, and the router
with `+routing=context` beside it.

verl imports this module with itself, in all its processes (sam/verl_door.py), and calls nothing of this project before
its trainer starts. So the trainers are joined when they are imported, `follow_import` below: they then start this
project's servers, share text between replicas and log `rollout/...`, where the config asks for it. What `${sam:...}`
stands for is computed in recipe/sam_dapo/launch/speculation.py. Other runs are verl's own.
"""

import functools
import importlib.abc
import importlib.machinery
import os
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from ray.runtime_context import RuntimeContext

from recipe.sam_dapo import patches_of_verl  # noqa: F401 - registers what is replaced here
from recipe.sam_dapo.arguments import did_you_mean
from recipe.sam_dapo.launch import routing, sharing, speculation
from recipe.sam_dapo.rollout import SESSION
from sam.config import SpeculationConfig
from sam.patching import wrap
from sam.switch.step_cost import StepCost

TRAINER = "verl.trainer.ppo.v1.trainer_base"


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
        key = re.match(r"[+~]*speculation\.([^.=@]+)=", word)
        if key and key[1] not in known:
            meant = did_you_mean(key[1], known) or f"the keys are {', '.join(known)}"
            refuse(f"speculation.{key[1]} is unknown: {meant}")


class Check(Callback):
    """Hydra's callback that refuses a wrong `speculation` section in the process that was started, before Ray is:
    what it raised later would be the last of a hundred lines."""

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        try:
            step_cost = speculation.resolved(config).step_cost
            if step_cost is not None:
                StepCost.load(Path(step_cost))
        except (ValueError, OmegaConfBaseException) as error:
            refuse(error)


check_words(sys.argv[1:])


def _with_session(get_job_id: Callable, context: RuntimeContext) -> str:
    return get_job_id(context) + os.environ[SESSION]


if os.environ.get(SESSION):  # of a run of the recipe
    wrap(RuntimeContext, "get_job_id", "name_job", _with_session)


class FollowImport(importlib.abc.MetaPathFinder):
    """Joins verl's trainers when their module has been imported: verl imports its plugins before."""

    @staticmethod
    def find_spec(name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """Python's own of verl's trainers, whose import is followed; None of every other module."""
        if name != TRAINER:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            wrap(spec.loader, "exec_module", "follow_import", _load_and_join)
        return spec


def _load_and_join(load: Callable, module: ModuleType) -> None:
    load(module)
    join_verl(module.PPOTrainer)


sys.meta_path.insert(0, FollowImport)


def join_verl(trainer_class: type) -> None:
    """Have verl's trainers do what this project adds around five of their methods, where the config asks for it."""
    for name, around in {
        "init": _start,
        "get_llm_client": _client,
        "step": _take_steps,
        "_validate": _forget_steps,
        "_compute_metrics": _add_metrics,
    }.items():
        wrap(trainer_class, name, "join_trainers", functools.partial(_call_around, around))


def _call_around(around: Callable, original: Callable, trainer, *arguments, **keywords) -> Any:
    if not speculation.asks_for_it(trainer.config):
        return original(trainer, *arguments, **keywords)
    return around(lambda: original(trainer, *arguments, **keywords), trainer, *arguments)


def replica_class() -> type:
    """Imported when the servers start, not before the workers do: vLLM takes seconds."""
    from recipe.sam_dapo.rollout.server import SpeculationReplica

    return SpeculationReplica


def _start(start: Callable, trainer) -> None:
    """Start workers, servers and router; then let drafters see each other's text, where they are to."""
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    from recipe.sam_dapo.rollout import router, server

    RolloutReplicaRegistry.register("vllm", replica_class)
    if routing.is_routed(trainer.config):
        routing.connect(trainer.config)
        router.write_config(trainer.config)
    start()
    trainer.sam_steps = []
    trainer.sam_routing = {}
    trainer.sam_log = None  # held, since an actor ends when nobody holds its handle
    if speculation.resolved(trainer.config).sharing == "replicas":
        trainer.sam_log = server.share_text(sharing.needed_mib(trainer.config))


def _client(get: Callable, trainer) -> Any:
    """verl's client of the servers, or the one that tells the recipe's router how long responses are."""
    if routing.is_routed(trainer.config):
        from recipe.sam_dapo.rollout.agent_loop import RoutedClient

        return trainer.llm_server_manager.get_client(client_cls=RoutedClient)
    return get()


def _take_steps(step: Callable, trainer, *_) -> Any:
    """Train a step; then take the engine steps since the last one, before the weights change.

    An asynchronous trainer's are those of all requests between two weight syncs, whichever step trains on them.
    """
    from recipe.sam_dapo.rollout import router, server

    router.read_history(trainer)
    batch = step()
    trainer.sam_steps = server.take_steps()
    trainer.sam_routing = router.take_metrics(trainer)
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
    from recipe.sam_dapo.record.metrics import rollout_metrics

    compute()
    metrics.update(trainer.sam_routing)
    if trainer.sam_steps:
        replicas, seconds = map(list, zip(*trainer.sam_steps, strict=True))
        metrics.update(rollout_metrics(replicas, seconds, int(trainer.config.speculation.batch_size_threshold)))
