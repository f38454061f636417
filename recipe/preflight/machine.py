"""What a machine must have besides its devices: memory, disk for checkpoints, shared memory, free ports."""

import math
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
from omegaconf import DictConfig

from recipe.launch import sharing
from recipe.preflight import device_memory
from recipe.preflight.device_memory import GIB, longest_sequence
from recipe.preflight.problem import Problem

SHARED_MEMORY = Path("/dev/shm")
# What one vLLM engine maps (vllm/v1/executor/multiproc_executor.py, vllm/distributed/parallel_state.py): ten chunks of
# 16 MiB for what it tells its ranks, ten of 24 MiB for what each rank answers, six of 4 MiB among the ranks.
ENGINE_MIB, RANK_MIB, GROUP_MIB = 160, 240, 24
RAY_BYTES = 10**10  # from here on Ray keeps its objects in shared memory, below on disk (REQUIRE_SHM_SIZE_THRESHOLD)
RAY_CLIENT_PORT = 10001
AUTOMATON_BYTES = 102  # of a token: sam.automaton.store's blocks, which numba makes slow to import
HCCL_PORTS = "HCCL_HOST_SOCKET_PORT_RANGE"
NETWORK_CARDS = ("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def find_problems(config: DictConfig) -> Iterator[Problem]:
    parts = memory_parts(config)
    wanted = max(_minimum(config, "memory_gib"), sum(parts.values()))
    if (free := free_memory_gib()) < wanted:
        value = f"{free:.1f} GiB of memory are free, {wanted:.0f} are needed"
        yield Problem("machine.memory", value + f" ({described(parts)})" * any(parts.values()))
    place = next(path for path in (Path(config.run_dir), *Path(config.run_dir).parents) if path.exists())
    one, kept = device_memory.checkpoint_gib(config), checkpoints_at_once(config)
    wanted = max(_minimum(config, "disk_gib"), one * kept)
    if (free := free_gib(place)) < wanted:
        value = f"{free:.1f} GiB of disk are free below {place}, {wanted:.0f} are needed"
        yield Problem("machine.disk", value + f" for {kept} checkpoints of {one:.0f} GiB" * (one > 0))
    wanted = sum((parts := shared_memory_parts(config)).values())
    if SHARED_MEMORY.is_dir() and (free := free_gib(SHARED_MEMORY)) < wanted:
        value = f"{free:.1f} GiB are free in {SHARED_MEMORY}, {wanted:.1f} are needed ({described(parts)})"
        remedy = f"start the container with --shm-size={math.ceil(wanted)}g or more"
        yield Problem("machine.shared_memory", value, remedy)
    yield from _variables(config)


def free_memory_gib() -> float:
    return psutil.virtual_memory().available / GIB


def free_gib(place: Path) -> float:
    return shutil.disk_usage(place).free / GIB


def described(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {gib:.1f}" for name, gib in parts.items() if gib)


def _minimum(config: DictConfig, name: str) -> float:
    """What configs for a CPU say that a run needs; other devices' needs are calculated from the model."""
    return config.machine[name] if "machine" in config else 0


def memory_parts(config: DictConfig) -> dict[str, float]:
    """GiB that each use of a node's memory takes at most, where it can be said before the run."""
    speculation, rollout = config.speculation, config.actor_rollout_ref.rollout
    drafts_from_text = speculation.method in sharing.METHODS
    engines = max(1, config.trainer.n_gpus_per_node // rollout.tensor_model_parallel_size)
    # If every response of a round were as long as it may be.
    round_gib = config.data.gen_batch_size * rollout.n * longest_sequence(config) * AUTOMATON_BYTES / GIB
    shares = speculation.sharing == "replicas"
    return {
        "what devices hand over between updates": device_memory.offloaded_gib(config),
        "drafters' automata": drafts_from_text * engines * min(speculation.memory_budget_mib / 1024, round_gib),
        "sharing's log": sharing.needed_mib(config) / 1024 if shares else 0.0,  # it may be on any node
    }


def checkpoints_at_once(config: DictConfig) -> int:
    """verl removes an old checkpoint before it writes the next, but never the only one."""
    trainer = config.trainer
    if trainer.save_freq is None or trainer.save_freq <= 0:
        return 0
    steps = trainer.total_training_steps
    written = max(1, steps // trainer.save_freq) if steps else math.inf  # verl writes one after the last step too
    return int(min(written, max(2, trainer.max_actor_ckpt_to_keep or 100)))


def shared_memory_parts(config: DictConfig) -> dict[str, float]:
    """GiB of shared memory that one machine needs, by what it is for."""
    rollout, devices = config.actor_rollout_ref.rollout, config.trainer.n_gpus_per_node
    queues = 0.0
    if rollout.engine_kwargs.vllm.get("distributed_executor_backend") != "uni":
        ranks = min(rollout.tensor_model_parallel_size, devices)
        mebibytes = ENGINE_MIB + RANK_MIB * ranks + (GROUP_MIB if ranks > 1 else 0)
        queues = devices // ranks * mebibytes / 1024
    # verl's weight sync on a CPU; on devices it goes from device to device.
    bucket = rollout.checkpoint_engine.update_weights_bucket_megabytes / 1024
    starts_later = config.trainer.device != "cpu" and not os.environ.get("RAY_ADDRESS")
    return {
        "vLLM's queues between ranks": queues,
        "verl's weight sync": bucket * devices if config.trainer.device == "cpu" else 0.0,
        "Ray's objects": RAY_BYTES / GIB if starts_later else 0.0,
    }


def _variables(config: DictConfig) -> Iterator[Problem]:
    """Fixed ports, as verl and vLLM ask the system for the others, and network cards for collectives."""
    if config.trainer.nnodes > 1 and not os.environ.get("RAY_ADDRESS"):
        for port in (int(os.environ.get("PORT") or 6379), RAY_CLIENT_PORT):
            if not is_free(port):
                yield Problem("machine.ports", f"port {port} of a Ray head", "stop what listens there, or set PORT")
    wanted = os.environ.get(HCCL_PORTS, "auto").strip()  # verl sets auto, with which the system chooses
    ranges = [re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part) for part in wanted.split(",")]
    ports = [port for one in ranges if one for port in range(int(one[1]), int(one[2] or one[1]) + 1)]
    if config.trainer.device == "npu" and wanted != "auto" and not (all(ranges) and all(map(is_free, ports))):
        yield Problem("machine.ports", f"{HCCL_PORTS}={wanted}, expected auto, or ranges such as 60000-60050")
    there = sorted(psutil.net_if_addrs())
    for variable in NETWORK_CARDS:
        wanted = os.environ.get(variable, "").strip()
        names = tuple(name for name in wanted.lstrip("=").split(",") if name)  # = is exactly this, ^ none of these
        if names and not wanted.startswith("^") and not any(one.startswith(names) for one in there):
            value = f"{variable}={wanted}: no such network card on this node"
            yield Problem("variable.refused", value, f"set it to one of {', '.join(there)}")


def is_free(port: int, host: str = "") -> bool:
    """Whether a program could listen there; never at another machine's address. Ports of ended connections are free."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except (OSError, OverflowError):
        return False
    return True
