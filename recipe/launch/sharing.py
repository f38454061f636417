"""Whether the drafters of a run share text between replicas, and the memory that this takes: decided here alone."""

import math
from dataclasses import replace

from omegaconf import DictConfig

from sam.config import SpeculationConfig
from sam.sharing.groups import most_bytes

METHODS = ("sam", "hybrid")  # that draft from text
MIB = 1 << 20


def resolve(config: DictConfig, speculation: SpeculationConfig) -> SpeculationConfig:
    """`speculation` with sharing=replicas or none in place of auto, and the memory of the shards where it is null."""
    if speculation.method not in METHODS or (wanted := speculation.sharing) == "none":
        return replace(speculation, sharing="none")
    if wanted == "auto" and (speculation.scope == "request" or replicas(config) < 2):
        return replace(speculation, sharing="none")
    memory = speculation.sharing_memory_mib or needed_mib(config)
    return replace(speculation, sharing="replicas", sharing_memory_mib=memory)


def replicas(config: DictConfig) -> int:
    """Of the rollout, as verl counts them."""
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    one = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    return trainer.nnodes * trainer.n_gpus_per_node // (one * (rollout.get("pipeline_model_parallel_size") or 1))


def needed_mib(config: DictConfig) -> int:
    """Of all shards, if every response to a round's prompts were as long as it may be."""
    prompts, samples = config.data.gen_batch_size, config.actor_rollout_ref.rollout.n
    return math.ceil(most_bytes(prompts, samples, config.data.max_response_length) / MIB)


def describe(config: DictConfig) -> str:
    """One line about a config that is composed."""
    speculation, count = config.speculation, replicas(config)
    ranks = config.actor_rollout_ref.rollout.data_parallel_size
    all_replicas = f"{count} replica{'s' * (count != 1)}"
    if ranks > 1:  # each is an engine of its own, with a drafter
        all_replicas += f" of {ranks} data-parallel ranks"
    if speculation.sharing != "replicas":
        if ranks > 1:
            own = "data-parallel rank, and the ranks of a replica do not share"
            return f"none, drafters see the text of their own {own} ({all_replicas})"
        return f"none, drafters see the text of their own replica ({count} in all)"
    shards = int(speculation.sharing_shards)
    seen = "see each other's text through" if count * ranks > 1 else "has no other to share with, its text is in"
    memory = f"{speculation.sharing_memory_mib} MiB in all at most (speculation.sharing=none: without)"
    return f"{all_replicas} {seen} {shards} shard{'s' * (shards > 1)}, {memory}"
