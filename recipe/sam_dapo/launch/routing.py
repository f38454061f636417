"""Which router a run has, verl's balancer or the recipe's, and in what chunks: decided here alone."""

import importlib.util
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from sam.routing import RoutingSettings

POLICIES = ("verl", "context")
ROUTER_FILE = "router.yaml"
ROUTER_KEY = "actor_rollout_ref.rollout.router_config_path"


def is_routed(config: DictConfig) -> bool:
    """Whether a run has the recipe's router; a script of verl's own has no section `routing` unless it asks for it."""
    return "routing" in config and config.routing.policy == "context"


def router_file(config: DictConfig) -> str:
    """The path of the router's file; a script of verl's own has its checkpoints beside it."""
    return str(Path(config.run_dir if "run_dir" in config else config.trainer.default_local_dir) / ROUTER_FILE)


def connect(config: DictConfig) -> None:
    """Check the `routing` section (ValueError), and point verl's key at the router's file, which the trainer writes."""
    check(config)
    if is_routed(config):
        config.actor_rollout_ref.rollout.router_config_path = router_file(config)


def check(config: DictConfig) -> None:
    """Raise ValueError unless the `routing` section and verl's key of a router fit each other and the run."""
    routing = config.routing
    own = config.actor_rollout_ref.rollout.router_config_path
    mode = config.trainer.v1.trainer_mode
    chunk = f"routing.chunk_tokens={routing.chunk_tokens}"
    if routing.policy not in POLICIES:
        raise ValueError(f"routing.policy={routing.policy!r}: expected one of {', '.join(POLICIES)}")
    RoutingSettings(routing.chunk_tokens)
    if routing.policy == "verl":
        if routing.chunk_tokens is not None:
            raise ValueError(
                f"{chunk}: without routing=context responses are generated whole: set routing=context, or "
                "routing.chunk_tokens=null"
            )
        if own is not None:
            _check_router(own)
        return
    if mode != "sync":
        raise ValueError(f"trainer.v1.trainer_mode={mode}: routing=context is for sync alone: set routing=verl")
    if routing.chunk_tokens is not None and config.speculation.verification == "rejection":
        raise ValueError(
            f"{chunk}: with speculation.verification=rejection each chunk of a response begins with the same random "
            "numbers: set speculation.verification=exact, or routing.chunk_tokens=null"
        )
    if own not in (None, router_file(config)):
        raise ValueError(
            f"{ROUTER_KEY}={own}: routing=context brings a router of its own: leave it null, or set routing=verl to "
            "use yours"
        )


def describe(config: DictConfig) -> str:
    """One line about a config that is composed."""
    routing = config.routing
    own = config.actor_rollout_ref.rollout.router_config_path
    if routing.policy == "verl" and own is not None:
        return f"the router that {own} names"
    if routing.policy == "verl":
        return "verl's balancer (routing=context: the recipe's router)"
    chunks = f"chunks of {routing.chunk_tokens} tokens" if routing.chunk_tokens else "whole responses"
    return f"context, {chunks} (routing=verl: verl's balancer)"


def _check_router(path: str) -> None:
    """Raise ValueError unless a file for verl names a router whose module is installed."""
    if not Path(path).is_file():
        raise ValueError(f"{ROUTER_KEY}={path}: no such file: name a YAML file with router_class, or leave it null")
    name = str(OmegaConf.load(path).get("router_class"))
    module = None
    with suppress(ImportError):
        module = importlib.util.find_spec(name.rpartition(".")[0] or "no module")
    if module is None:
        raise ValueError(f"{ROUTER_KEY}={path}: its router_class {name} is not in an installed module: correct it")
