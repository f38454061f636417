"""Which router a run has, verl's balancer or the recipe's, and in what chunks: decided here alone."""

import importlib.util
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from sam.routing import RoutingSettings

POLICIES = ("verl", "context")
ROUTER_FILE = "router.yaml"
ROUTER_KEY = "actor_rollout_ref.rollout.router_config_path"


def connect(config: DictConfig) -> None:
    """Check the `routing` section (ValueError), and point verl's key at the router's file, which the trainer writes."""
    routing, rollout = config.routing, config.actor_rollout_ref.rollout
    if routing.policy not in POLICIES:
        raise ValueError(f"routing.policy={routing.policy!r}: expected one of {', '.join(POLICIES)}")
    RoutingSettings(routing.chunk_tokens)
    own, chunk = rollout.router_config_path, f"routing.chunk_tokens={routing.chunk_tokens}"
    if routing.policy == "verl":
        if routing.chunk_tokens is not None:
            raise ValueError(
                f"{chunk}: without routing=context responses are generated whole: set routing=context, or "
                "routing.chunk_tokens=null"
            )
        if own is not None:
            _check_router(own)
        return
    if routing.chunk_tokens is not None and config.speculation.verification == "rejection":
        raise ValueError(
            f"{chunk}: with speculation.verification=rejection each chunk of a response begins with the same random "
            "numbers: set speculation.verification=exact, or routing.chunk_tokens=null"
        )
    if own is not None:
        raise ValueError(
            f"{ROUTER_KEY}={own}: routing=context brings a router of its own: leave it null, or set routing=verl to "
            "use yours"
        )
    rollout.router_config_path = str(Path(config.run_dir) / ROUTER_FILE)


def describe(config: DictConfig) -> str:
    """One line about a config that is composed."""
    routing, own = config.routing, config.actor_rollout_ref.rollout.router_config_path
    if own is not None and routing.policy == "verl":
        return f"the router that {own} names"
    if routing.policy == "verl":
        return "verl's balancer (routing=context: the recipe's router)"
    chunks = f"chunks of {routing.chunk_tokens} tokens" if routing.chunk_tokens else "whole responses"
    return f"context, {chunks} (routing=verl: verl's balancer)"


def _check_router(path: str) -> None:
    """Raise ValueError unless a file for verl names a router whose module is installed."""
    if not Path(path).is_file():
        raise ValueError(f"{ROUTER_KEY}={path}: no such file: name a YAML file with router_class, or leave it null")
    named, found = str(OmegaConf.load(path).get("router_class")), None
    with suppress(ImportError):
        found = importlib.util.find_spec(named.rpartition(".")[0] or "no module")
    if found is None:
        raise ValueError(f"{ROUTER_KEY}={path}: its router_class {named} is not in an installed module: correct it")
