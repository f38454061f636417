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
    if speculation.method not in METHODS:
        shares = False
    return replace(speculation, sharing="replicas" if shares else "none")


def replicas(config: DictConfig) -> int:
    """Of the rollout, as verl counts them: on the devices that train and, apart from these, on the rollout's own."""
    trainer = config.trainer
    rollout = config.actor_rollout_ref.rollout
    devices = rollout.tensor_model_parallel_size * rollout.data_parallel_size  # of a replica
    devices *= rollout.get("pipeline_model_parallel_size") or 1
    beside_training = trainer.nnodes * trainer.n_gpus_per_node // devices
    if trainer.v1.trainer_mode != "separate_async":
        return beside_training
    apart = rollout.nnodes * rollout.n_gpus_per_node // devices
    return apart + beside_training if config.actor_rollout_ref.hybrid_engine else apart


def needed_mib(config: DictConfig) -> int:
    """Of the log, if every response to the prompts under way were as long as it may be: its budget."""
    from sam.sharing.log import most_bytes  # numba takes half a second to import: `sam run --help` need not wait for it

    # verl's own default is null, and to an asynchronous trainer, which is some batches ahead, it gives them one by one.
    prompts = max(config.data.gen_batch_size or 0, config.data.train_batch_size)
    trainer = config.trainer.v1
    batches_ahead = (trainer.get(trainer.trainer_mode) or {}).get("num_warmup_batches", 0)
    prompts *= 1 + batches_ahead
    size = most_bytes(prompts, config.actor_rollout_ref.rollout.n, config.data.max_response_length)
    return math.ceil(size / MIB)


def describe(config: DictConfig) -> str:
    """One line about a config that is composed."""
    count = replicas(config)
    ranks = config.actor_rollout_ref.rollout.data_parallel_size
    all_replicas = "1 replica" if count == 1 else f"{count} replicas"
    if ranks > 1:
        all_replicas += f" of {ranks} data-parallel ranks"
    if config.speculation.sharing != "replicas":
        engine = "data-parallel rank" if ranks > 1 else "replica"  # each rank has a drafter
        return f"none, drafters see the text of their own {engine} ({all_replicas})"
    seen = "see each other's text" if count * ranks > 1 else "has no other to share with"
    return f"{all_replicas} {seen}, in {needed_mib(config)} MiB at most (speculation.sharing=none: without)"
