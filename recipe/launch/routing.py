"""Which router a run has, verl's balancer or the recipe's, and in what chunks: decided here alone."""

import importlib.util
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf

from recipe.launch.sharing import replicas
from sam.routing.policy import RoutingSettings

POLICIES = ("auto", "verl", "context")
ROUTER_FILE = "router.yaml"
ROUTER_KEY = "actor_rollout_ref.rollout.router_config_path"
# Of `auto`: chunks of a response of full length, and tokens of a chunk at least. Chunks let the router reserve KV cache
# for a chunk instead of the longest response, without which slots could stay empty that verl's balancer would fill.
CHUNKS, LEAST_CHUNK = 8, 256


def connect(config: DictConfig) -> None:
    """Put verl or context in place of auto, check the `routing` section, and point verl's key at the router's file,
    which the trainer writes.

    Raises:
        ValueError: names the key, its value and what is expected.
    """
    routing, rollout = config.routing, config.actor_rollout_ref.rollout
    if routing.policy not in POLICIES:
        raise ValueError(f"routing.policy={routing.policy!r}: expected one of {', '.join(POLICIES)}")
    RoutingSettings(routing.chunk_tokens, routing.max_wait, ahead=routing.ahead)
    if type(routing.settle_ms) not in (int, float) or routing.settle_ms < 0:
        raise ValueError(f"routing.settle_ms={routing.settle_ms}: expected milliseconds, 0 or more")
    if routing.policy == "auto":
        _resolve(config)
    path = rollout.router_config_path
    if routing.policy == "context":
        if routing.chunk_tokens is not None and config.speculation.verification == "rejection":
            raise ValueError(
                f"routing.chunk_tokens={routing.chunk_tokens}: with speculation.verification=rejection each chunk of a "
                "response begins with the same random numbers: set speculation.verification=exact, or "
                "routing.chunk_tokens=null"
            )
        if path is not None:
            raise ValueError(
                f"{ROUTER_KEY}={path}: routing=context brings a router of its own: leave it null, or set "
                "routing=verl to use yours"
            )
        rollout.router_config_path = str(Path(config.run_dir) / ROUTER_FILE)
        return
    if routing.chunk_tokens is not None:
        raise ValueError(
            f"routing.chunk_tokens={routing.chunk_tokens}: without routing=context responses are generated whole: set "
            "routing=context, or routing.chunk_tokens=null"
        )
    if path is not None:
        _check_router(path)


def _resolve(config: DictConfig) -> None:
    """The recipe's router where there is something to decide, and nobody has brought one.

    On a CPU it loses (docs/results.md): its messages take the engines' cores. Numbers that make no
    sense give verl's: the checks name them.
    """
    routing, own = config.routing, config.actor_rollout_ref.rollout.router_config_path
    load = _load(config) if own is None and config.trainer.device != "cpu" else None
    routing.policy = "verl"
    if load is not None and (load.replicas > 1 or load.requests > load.slots):
        routing.policy = "context"
        if routing.chunk_tokens is None and config.speculation.verification != "rejection":
            routing.chunk_tokens = max(LEAST_CHUNK, -(-config.data.max_response_length // CHUNKS))


class Load(NamedTuple):
    """Requests of a round, and the slots of all replicas."""

    replicas: int
    requests: int
    slots: int


def _load(config: DictConfig) -> Load | None:
    """None if the config's numbers make no sense."""
    rollout, trainer, data = config.actor_rollout_ref.rollout, config.trainer, config.data
    rounds = config.trainer.v1.sampler.sampler_kwargs  # verl sets data.gen_batch_size to 1 when it starts
    prompts = rounds.gen_batch_size if rounds.enable else data.train_batch_size
    sizes = trainer.nnodes, trainer.n_gpus_per_node, rollout.tensor_model_parallel_size, rollout.data_parallel_size
    if any(type(n) is not int or n < 1 for n in (*sizes, prompts, rollout.n, rollout.max_num_seqs)):
        return None
    if type(data.max_response_length) is not int or not (count := replicas(config)):
        return None
    return Load(count, prompts * rollout.n, count * rollout.data_parallel_size * rollout.max_num_seqs)


def describe(config: DictConfig) -> str:
    """One line about a config that is composed."""
    routing, own = config.routing, config.actor_rollout_ref.rollout.router_config_path
    if routing.policy == "verl" and own is not None:
        return f"the router that {own} names"
    load, on_cpu = _load(config), "a CPU, " * (config.trainer.device == "cpu")
    why = f"{on_cpu}no replica fits the devices"  # of which preflight tells, in the same table as this line
    if load is not None:
        count, requests, slots = load
        why = f"{on_cpu}{count} replica{'s' * (count > 1)}, {requests} requests in a round, {slots} slots"
    if routing.policy == "verl":
        return f"verl's balancer ({why}; routing=context: the recipe's router)"
    chunks = f"chunks of {routing.chunk_tokens} tokens" if routing.chunk_tokens else "whole responses"
    return f"context, {chunks} ({why}; routing=verl: verl's balancer)"


def _check_router(path: str) -> None:
    """Raise ValueError unless a file for verl names a router whose module is installed."""
    if not Path(path).is_file():
        raise ValueError(f"{ROUTER_KEY}={path}: no such file: name a YAML file with router_class, or leave it null")
    named = str(OmegaConf.load(path).get("router_class"))
    module = named.rpartition(".")[0]
    try:
        found = importlib.util.find_spec(module) if module else None
    except ImportError:
        found = None
    if found is None:
        raise ValueError(f"{ROUTER_KEY}={path}: its router_class {named} is not in an installed module: correct it")
