"""What machines must have: a device, memory, disk, shared memory, and a Ray cluster. GiB are 2**30 bytes."""

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
from omegaconf import DictConfig, OmegaConf

from recipe.sam_dapo.launch import versions
from recipe.sam_dapo.preflight.device_memory import GIB, device_memory

DEVICE_FILES = {"npu": ("davinci[0-9]*",), "cuda": ("nvidia[0-9]*", "dxg")}  # below /dev; the last one is WSL's
ON_A_CPU = "on a CPU add scale=smoke, or take scripts/run_dapo_tiny_cpu.sh"
ELSEWHERE = {"npu": f"on GPUs add device=cuda training=fsdp2, {ON_A_CPU}", "cuda": ON_A_CPU}


def has_device(device: str) -> bool:
    """Whether this machine has one; it always has a CPU."""
    patterns = DEVICE_FILES.get(device)
    return patterns is None or any(any(Path("/dev").glob(pattern)) for pattern in patterns)


def missing_device(config: DictConfig) -> Iterator[str]:
    """Whether a run would find its device: here, unless a Ray is named, whose nodes have them."""
    device = config.trainer.device
    if not has_device(device) and not os.environ.get("RAY_ADDRESS"):
        problem = f"no {device} device here, so packages, memory and disk were not looked at"
        yield f"{problem}: {ELSEWHERE[device]} [machine.device]"


SHARED_MEMORY = Path("/dev/shm")
RANK_GIB = 0.3  # of shared memory, at most: an engine's queues for each of its ranks (vLLM's multiproc_executor.py)


def memory_and_disk(config: DictConfig) -> Iterator[str]:
    """Whether this machine has as much of them free as a run takes."""
    least = config.get("machine") or {}  # what configs for a CPU say that a run needs
    memory = device_memory(config)
    offloaded = memory.offloaded if memory else 0.0
    wanted = max(least.get("memory_gib", 0), offloaded)
    free = free_memory_gib()
    if free < wanted:
        lacks = _lacks("memory", free, wanted, "machine.memory_gib, and what devices hand over")
        yield f"{lacks}: stop other programs, or take more nodes [machine.memory]"
    checkpoint = memory.checkpoint if memory else 0.0
    count = checkpoints_kept(config.trainer)
    wanted = max(least.get("disk_gib", 0), checkpoint * count)
    place = present(config)
    free = free_gib(place)
    if free < wanted:
        why = f"machine.disk_gib, and {count} checkpoints of {checkpoint:.0f} GiB"
        lacks = _lacks(f"disk below {place}", free, wanted, why)
        yield f"{lacks}: free some, set run_dir, or keep fewer [machine.disk]"
    wanted = shared_memory_gib(config)
    free = free_gib(SHARED_MEMORY)
    if free < wanted:
        lacks = _lacks(str(SHARED_MEMORY), free, wanted, "what processes hand over")
        remedy = f"start the container with --shm-size={math.ceil(wanted)}g or more"
        yield f"{lacks}: {remedy} [machine.shared_memory]"


def _lacks(what: str, free: float, wanted: float, why: str) -> str:
    return f"{free:.1f} GiB of {what} are free, {wanted:.1f} are needed ({why})"


def checkpoints_kept(trainer: DictConfig) -> int:
    """How many lie on the disk at once: verl removes an old one before it writes the next, but never the only one."""
    if trainer.save_freq <= 0:
        return 0
    most = max(2, trainer.max_actor_ckpt_to_keep or 100)
    if trainer.total_training_steps is None:
        return most
    return min(most, max(1, trainer.total_training_steps // trainer.save_freq))


def shared_memory_gib(config: DictConfig) -> float:
    """What a machine's processes hand each other through it."""
    trainer = config.trainer
    if trainer.device == "cpu":  # weights go through it; from device to device elsewhere
        bucket = config.actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes
        return trainer.n_gpus_per_node * bucket / 1024
    return RANK_GIB * trainer.n_gpus_per_node


def present(config: DictConfig) -> Path:
    """run_dir, or what is there already of the folders above it."""
    run_directory = Path(config.run_dir).absolute()
    return next(path for path in (run_directory, *run_directory.parents) if path.exists())


def free_memory_gib() -> float:
    return psutil.virtual_memory().available / GIB


def free_gib(place: Path) -> float:
    return shutil.disk_usage(place).free / GIB


ANSWER_SECONDS = 180.0  # a node imports Ray, reads the headers of all shards from the shared file system
COMPARED = ("commit", "python", *versions.RECORDED)
INSTALL = "install the project and the pins of requirements/ on that node"
START = "bash scripts/start_ray_cluster.sh head here, worker HEAD_ADDRESS on the other nodes"


def ray_cluster(config: DictConfig, find: Callable[[dict, dict], list[str]]) -> Iterator[str]:
    """With RAY_ADDRESS set: whether the cluster has as many nodes, and every node what it needs.

    `find` runs on each node and finds the lines about it, of a config's content and what `differences` takes.
    """
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        return
    # As scripts/ascend_environment.sh has it; Ray 2.60 takes an old token in ~/.ray otherwise.
    has_token = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    os.environ.setdefault("RAY_AUTH_MODE", "token" if has_token else "disabled")
    import ray

    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
        nodes = [node for node in ray.nodes() if node["Alive"]]
        if len(nodes) < config.trainer.nnodes:
            yield f"{len(nodes)} of {config.trainer.nnodes} nodes are there: {START} [ray.devices]"
        with tempfile.NamedTemporaryFile(dir=present(config), prefix=".sam-") as seen_by_all:
            head = {"versions": versions.known(), "file": seen_by_all.name}
            by_node = ask_nodes(config, nodes, find, head)
        for line in dict.fromkeys(line for lines in by_node.values() for line in lines):
            places = [address for address, lines in by_node.items() if line in lines]
            where = "every node" if len(places) == len(by_node) > 1 else ", ".join(places)
            yield f"on {where}: {line}"
    except Exception as error:  # Ray's, or a run_dir that cannot be written to
        yield f"RAY_ADDRESS={address}, run_dir={config.run_dir}: {first_line(error)}: {START} [ray.head]"
    finally:
        ray.shutdown()


def ask_nodes(config: DictConfig, nodes: list[dict], find: Callable, head: dict) -> dict[str, list[str]]:
    """The lines about each node, by its address."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask = ray.remote(num_cpus=0, max_retries=0)(find)
    content = OmegaConf.to_container(config)
    asked = {}
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked[node["NodeManagerAddress"]] = ask.options(scheduling_strategy=there).remote(content, head)
    lines = {}
    for address, answer in asked.items():
        try:
            lines[address] = ray.get(answer, timeout=ANSWER_SECONDS)
        except ray.exceptions.RayError as error:  # with that of the node in it
            reason = str(error).strip().splitlines()[-1]
            lines[address] = [f"preflight cannot run: {reason}: {INSTALL} [ray.node]"]
    return lines


def differences(head: dict) -> Iterator[str]:
    """What this node has otherwise than the head, which tells its `versions` and a `file` in run_dir or above it."""
    here = versions.known()
    for name in COMPARED:
        wanted = head["versions"][name]
        if here[name] != wanted:
            yield f"{name} {here[name]}, the head has {wanted}: install the same on every node [node.differs]"
    file = Path(head["file"])
    if not file.exists():
        problem = f"{file.parent} is another folder than the head's: a rank's part of a checkpoint stays here"
        yield f"{problem}: set run_dir to a folder that all nodes share [run_dir.not_shared]"


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
