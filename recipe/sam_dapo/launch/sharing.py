"""Whether the drafters of a run share text between replicas, and the memory that this takes: decided here alone."""

import math
from dataclasses import replace

from omegaconf import DictConfig

from sam.config import SpeculationConfig

METHODS = ("sam", "hybrid")  # that draft from text
MIB = 1 << 20


def resolve(config: DictConfig, speculation: SpeculationConfig) -> SpeculationConfig:
    """`speculation` with sharing=replicas or none in place of auto."""
    shares = speculation.sharing == "replicas"
    if speculation.sharing == "auto":
        shares = speculation.scope != "request" and replicas(config) > 1
    return replace(speculation, sharing="replicas" if shares and speculation.method in METHODS else "none")


def replicas(config: DictConfig) -> int:
    """Of the rollout, as verl counts them: on the devices that train and, apart from these, on the rollout's own."""
    actor, trainer = config.actor_rollout_ref, config.trainer
    rollout = actor.rollout
    one = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    one *= rollout.get("pipeline_model_parallel_size") or 1
    trains, own = (part.nnodes * part.n_gpus_per_node // one for part in (trainer, rollout))
    if trainer.v1.trainer_mode != "separate_async":
        return trains
    return own + (trains if actor.hybrid_engine else 0)


def needed_mib(config: DictConfig) -> int:
    """Of the log, if every response to the prompts under way were as long as it may be: its budget."""
    from sam.sharing.log import most_bytes  # numba takes half a second to import: `sam run --help` need not wait for it

    # verl's own default is null, and to an asynchronous trainer, which is some batches ahead, it gives them one by one.
    prompts = max(config.data.gen_batch_size or 0, config.data.train_batch_size)
    trainer = config.trainer.v1
    prompts *= 1 + (trainer.get(trainer.trainer_mode) or {}).get("num_warmup_batches", 0)
    return math.ceil(most_bytes(prompts, config.actor_rollout_ref.rollout.n, config.data.max_response_length) / MIB)


def describe(config: DictConfig) -> str:
    """One line about a config that is composed."""
    count, ranks = replicas(config), config.actor_rollout_ref.rollout.data_parallel_size
    all_replicas = f"{count} replica{'s' * (count != 1)}" + f" of {ranks} data-parallel ranks" * (ranks > 1)
    if config.speculation.sharing != "replicas":
        own = "data-parallel rank" if ranks > 1 else "replica"  # each rank is an engine of its own, with a drafter
        return f"none, drafters see the text of their own {own} ({all_replicas})"
    seen = "see each other's text" if count * ranks > 1 else "has no other to share with"
    return f"{all_replicas} {seen}, in {needed_mib(config)} MiB at most (speculation.sharing=none: without)"
