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

from recipe.launch import environment, sharing
from recipe.preflight import device_memory, files
from recipe.preflight.device_memory import GIB, longest_sequence
from recipe.preflight.problem import Problem, first_line
from sam.trained_drafter import settings_of

SHARED_MEMORY = Path("/dev/shm")
# What one vLLM engine maps (vllm/v1/executor/multiproc_executor.py, vllm/distributed/parallel_state.py): ten chunks of
# 16 MiB for what it tells its ranks, ten of 24 MiB for what each rank answers, six of 4 MiB among the ranks.
ENGINE_MIB, RANK_MIB, GROUP_MIB = 160, 240, 24
RAY_BYTES = 10**10  # from here on Ray keeps its objects in shared memory, below on disk (REQUIRE_SHM_SIZE_THRESHOLD)
RAY_CLIENT_PORT = 10001
CPU_CACHE = "VLLM_CPU_KVCACHE_SPACE"  # GiB of an engine on a CPU
AUTOMATON_BYTES = 108  # of a token: sam.automaton.store's blocks, which numba makes slow to import


def find_problems(config: DictConfig) -> Iterator[Problem]:
    for find in (_memory, _disk, _shared_memory, _ports, _interfaces):
        yield from find(config)


def free_memory_gib() -> float:
    return psutil.virtual_memory().available / GIB


def free_gib(place: Path) -> float:
    return shutil.disk_usage(place).free / GIB


def _minimum(config: DictConfig, name: str) -> float:
    """What configs for a CPU say that a run needs; other devices' needs are calculated from the model."""
    return config.machine[name] if "machine" in config else 0


def _memory(config: DictConfig) -> Iterator[Problem]:
    parts = memory_parts(config)
    wanted = max(_minimum(config, "memory_gib"), sum(parts.values()))
    if (free := free_memory_gib()) < wanted:
        described = ", ".join(f"{name} {gib:.1f}" for name, gib in parts.items() if gib)
        value = f"{free:.1f} GiB of memory are free, {wanted:.0f} are needed"
        yield Problem("machine.memory", value + f" ({described})" * bool(described))


def memory_parts(config: DictConfig) -> dict[str, float]:
    """GiB that each use of a node's memory takes at most, where it can be said before the run."""
    shares = config.speculation.sharing == "replicas"
    return {
        "what devices hand over between updates": device_memory.offloaded_gib(config),
        "drafters' automata, history within": _automata_gib(config),
        "hidden states for EAGLE3": _hidden_states_gib(config),
        "sharing's log": sharing.needed_mib(config) / 1024 if shares else 0.0,  # it may be on any node
    }


def _automata_gib(config: DictConfig) -> float:
    """Of all engines of a node, if every response of a round were as long as it may be."""
    speculation, rollout = config.speculation, config.actor_rollout_ref.rollout
    if speculation.method not in sharing.METHODS:
        return 0.0
    tokens = config.data.gen_batch_size * rollout.n * longest_sequence(config)
    tokens += speculation.history_tokens if speculation.scope == "history" else 0
    return _engines(config) * min(speculation.memory_budget_mib / 1024, tokens * AUTOMATON_BYTES / GIB)


def _engines(config: DictConfig) -> int:
    """Of a node."""
    return max(1, config.trainer.n_gpus_per_node // config.actor_rollout_ref.rollout.tensor_model_parallel_size)


def _hidden_states_gib(config: DictConfig) -> float:
    """Of all engines of a node: a row for each slot of the KV cache (sam.vllm.trained.eagle), in numbers of one type.

    The head's own share of the KV cache is left out, so that this is an upper bound.
    """
    if files.trained_method(config) != "eagle3":
        return 0.0
    try:
        model = device_memory.Model.from_config(settings_of(Path(config.actor_rollout_ref.model.path).expanduser()))
    except KeyError:
        return 0.0
    row = files.layers_read(Path(config.speculation.draft_model)) * model.hidden
    of_cache = row / (2 * model.layers * model.key_value_heads * model.head_size)
    return _engines(config) * _cache_gib(config) * of_cache


def _cache_gib(config: DictConfig) -> float:
    """KV cache of an engine."""
    if (found := device_memory.estimates(config)) is not None:
        return found[0].cache
    return float(os.environ.get(CPU_CACHE) or environment.CPU[CPU_CACHE])


def _disk(config: DictConfig) -> Iterator[Problem]:
    place = next(path for path in (Path(config.run_dir), *Path(config.run_dir).parents) if path.exists())
    one, kept = device_memory.checkpoint_gib(config), checkpoints_at_once(config)
    wanted = max(_minimum(config, "disk_gib"), one * kept)
    if (free := free_gib(place)) < wanted:
        value = f"{free:.1f} GiB of disk are free below {place}, {wanted:.0f} are needed"
        yield Problem("machine.disk", value + f" for {kept} checkpoints of {one:.0f} GiB" * (one > 0))


def checkpoints_at_once(config: DictConfig) -> int:
    """verl removes an old checkpoint before it writes the next, but never the only one."""
    trainer = config.trainer
    if trainer.save_freq is None or trainer.save_freq <= 0:
        return 0
    steps = trainer.total_training_steps
    written = max(1, steps // trainer.save_freq) if steps else math.inf  # verl writes one after the last step too
    return int(min(written, max(2, trainer.max_actor_ckpt_to_keep or 100)))


def _shared_memory(config: DictConfig) -> Iterator[Problem]:
    if SHARED_MEMORY.is_dir():
        parts = shared_memory_parts(config)
        described = ", ".join(f"{name} {gib:.1f}" for name, gib in parts.items() if gib)
        yield from _too_little_shared_memory(sum(parts.values()), described)


def _too_little_shared_memory(wanted: float, described: str) -> Iterator[Problem]:
    if (free := free_gib(SHARED_MEMORY)) < wanted:
        value = f"{free:.1f} GiB are free in {SHARED_MEMORY}, {wanted:.1f} are needed ({described})"
        remedy = f"start the container with --shm-size={math.ceil(wanted)}g or more"
        yield Problem("machine.shared_memory", value, remedy)


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


def _ports(config: DictConfig) -> Iterator[Problem]:
    """verl and vLLM ask the system for free ports, and so does a Ray of the run's own; these are the fixed ones."""
    if (vllm := os.environ.get("VLLM_PORT")) is not None and not vllm.isdigit():
        yield Problem("machine.vllm_port", f"VLLM_PORT={vllm}")
    if config.trainer.nnodes > 1 and not os.environ.get("RAY_ADDRESS"):
        for port in (int(os.environ.get("PORT") or 6379), RAY_CLIENT_PORT):
            if not is_free(port):
                yield Problem("machine.port", f"port {port}")
    if config.trainer.device == "npu":
        yield from _collective_ports(os.environ.get("HCCL_HOST_SOCKET_PORT_RANGE", "auto"))


def _collective_ports(wanted: str) -> Iterator[Problem]:
    """HCCL's on the host; verl sets `auto`, with which the system chooses."""
    if wanted.strip() == "auto":
        return
    ranges = [re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part) for part in wanted.split(",")]
    if not all(ranges):
        yield Problem("machine.hccl_ports", f"HCCL_HOST_SOCKET_PORT_RANGE={wanted}")
        return
    ports = [port for found in ranges for port in range(int(found[1]), int(found[2] or found[1]) + 1)]
    if taken := [port for port in ports if not is_free(port)]:
        value = f"HCCL_HOST_SOCKET_PORT_RANGE={wanted}, {len(taken)} of its ports are taken, first {taken[0]}"
        yield Problem("machine.hccl_ports", value)


def _interfaces(_: DictConfig) -> Iterator[Problem]:
    """Network cards that collectives are told to use. HCCL's may begin with = (exactly this) or ^ (none of these)."""
    there = sorted(psutil.net_if_addrs())
    for variable in ("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = os.environ.get(variable, "").strip()
        names = tuple(name for name in wanted.lstrip("=").split(",") if name)
        if names and not wanted.startswith("^") and not any(one.startswith(names) for one in there):
            yield Problem("machine.network_card", f"{variable}={wanted}", f"set it to one of {', '.join(there)}")


def is_free(port: int, host: str = "") -> bool:
    """Whether a program could listen there; never at another machine's address. Ports of ended connections are free."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except (OSError, OverflowError):
        return False
    return True


def weight_sync_problems(config: DictConfig) -> Iterator[Problem]:
    """Whether this driver hands weights over on the device, as verl finds out: imports verl, calls npu-smi."""
    from verl.utils.device import is_support_ipc

    try:
        if is_support_ipc():
            return
    except Exception as error:
        yield Problem("weight_sync.driver", first_line(error))
        return
    # An old driver (verl asks for HDK 25.3.rc1) hands them over in shared memory.
    bucket = config.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes
    wanted = bucket * config.trainer.n_gpus_per_node / 1024
    yield from _too_little_shared_memory(wanted, "weight sync, which a driver from HDK 25.3.rc1 on does without")
    if (largest := device_memory.largest_tensor_mib(config)) > bucket:
        key = "rollout.checkpoint_engine.update_weights_bucket_megabytes"
        yield Problem("weight_sync.bucket", f"{key}={bucket}, {largest:.0f} of the largest tensor")
