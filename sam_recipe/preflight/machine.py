"""What machines must have: memory of their devices and their own, disk, shared memory, and a Ray cluster.

Estimates come from the model's config.json and the parallel sizes alone: communication buffers, fragmentation and
CANN's or CUDA's own memory are not in them. GiB are 2**30 bytes.
"""

import contextlib
import math
import os
import platform
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
from omegaconf import DictConfig, OmegaConf

from sam.trained_drafter import settings_of
from sam_recipe.launch import sharing, versions

GIB = 2**30
DEVICE_GIB = {"npu": 64, "cuda": 80}  # of one device: an A3 die, an H100
BF16, FP32 = 2, 4
OPTIMIZER = 3 * FP32  # master weights and two moments: Megatron's distributed optimizer, and what FSDP2 saves


class Model(NamedTuple):
    """A Qwen3, dense or with experts: sizes, and the parameters of its parts over all layers."""

    hidden: int
    layers: int
    heads: int
    key_value_heads: int
    head_size: int
    vocabulary: int
    experts: int
    embeddings: int
    attention: int  # and all else but the feed-forward part, routers included
    feed_forward: int


class DeviceMemory(NamedTuple):
    """GiB of one die, while generating and while updating with nothing offloaded that the update uses."""

    device: int
    weights: float
    cache: float
    cache_tokens: int
    longest_responses: float  # that the KV cache holds at once
    training: dict[str, float]  # of weights, gradients, optimizer, activations
    checkpoint: float  # one, with weights and optimizer
    offloaded: float  # of a machine's memory, for what its devices hand over between updates


def model_of(config: DictConfig) -> Model | None:
    """Read config.json; None for a CPU and where it is not there or has no sizes."""
    found = settings_of(Path(config.actor_rollout_ref.model.path).expanduser())
    try:
        hidden, layers, vocabulary = found["hidden_size"], found["num_hidden_layers"], found["vocab_size"]
        heads, key_value_heads = found["num_attention_heads"], found["num_key_value_heads"]
        head_size, experts = found.get("head_dim") or hidden // heads, found.get("num_experts", 0)
        intermediate = found["moe_intermediate_size"] if experts else found["intermediate_size"]
        embeddings = vocabulary * hidden * (1 if found.get("tie_word_embeddings") else 2)
        attention = layers * hidden * (2 * head_size * (heads + key_value_heads) + experts + 2)
        feed_forward = layers * 3 * hidden * intermediate * max(1, experts)
    except (KeyError, TypeError, ZeroDivisionError):
        return None
    sizes = hidden, layers, heads, key_value_heads, head_size, vocabulary, experts
    return Model(*sizes, embeddings, attention, feed_forward) if config.trainer.device in DEVICE_GIB else None


def device_count(config: DictConfig) -> int:
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def longest_sequence(config: DictConfig) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def uses_megatron(config: DictConfig) -> bool:
    """By the section that the choice of training composed: actor.strategy may be misspelt."""
    return "megatron" in config.actor_rollout_ref.actor


def device_memory(config: DictConfig) -> DeviceMemory | None:
    """None where the sizes are not known."""
    if (model := model_of(config)) is None:
        return None
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    device, is_megatron = DEVICE_GIB[config.trainer.device], uses_megatron(config)
    # Tensor-parallel ranks split attention and, without experts over ranks, everything.
    tensor, experts = rollout.tensor_model_parallel_size, rollout.expert_parallel_size
    split = experts if model.experts and experts > 1 else tensor
    weights = BF16 * ((model.embeddings + model.attention) / tensor + model.feed_forward / split)
    cache = max(0.0, rollout.gpu_memory_utilization * device * GIB - weights)
    key_value_bytes = 2 * model.layers * model.key_value_heads * model.head_size * BF16  # of a token, over all heads
    tokens = int(cache / (key_value_bytes / min(tensor, model.key_value_heads)))
    bytes_of = (_megatron if is_megatron else _fsdp)(model, config)
    # Megatron's weights are bf16 in Hugging Face's format, FSDP2's the float32 ones of the optimizer.
    parameters = model.embeddings + model.attention + model.feed_forward
    checkpoint = (BF16 * is_megatron + OPTIMIZER) * parameters / GIB
    settings = actor.megatron if is_megatron else actor.fsdp_config
    # FSDP's weights are a float32 share, as large as its gradients; `weights` has the gathered layer too.
    offloaded = bytes_of["weights" if is_megatron else "gradients"] * settings.param_offload
    offloaded = config.trainer.n_gpus_per_node * (offloaded + bytes_of["optimizer"] * settings.optimizer_offload) / GIB
    training = {name: size / GIB for name, size in bytes_of.items()}
    longest = tokens / longest_sequence(config)
    return DeviceMemory(device, weights / GIB, cache / GIB, tokens, longest, training, checkpoint, offloaded)


def _megatron(model: Model, config: DictConfig) -> dict[str, float]:
    """Bytes on a rank that trains, with full recomputation and sequence parallelism."""
    actor, dies = config.actor_rollout_ref.actor, device_count(config)
    names = ("tensor_model", "pipeline_model", "context", "expert_model")
    tensor, pipeline, context, experts = (actor.megatron[f"{name}_parallel_size"] for name in names)
    tokens = actor.ppo_max_token_len_per_gpu / tensor  # of a micro-batch, after the split over context ranks
    common = (model.attention + model.embeddings) / (tensor * pipeline)
    expert_split = experts * pipeline if model.experts else tensor * pipeline
    feed_forward = model.feed_forward / expert_split
    data = context * max(1, dies // (tensor * pipeline * context))
    expert_data = max(1, dies // expert_split) if model.experts else data
    kept = tokens * model.hidden * model.layers / pipeline * BF16
    one_layer = tokens * (8 * model.hidden + 6 * model.head_size * model.heads) * BF16
    return {
        "weights": BF16 * (common + feed_forward),
        "gradients": FP32 * (common + feed_forward),
        "optimizer": OPTIMIZER * (common / data + feed_forward / expert_data),
        "activations": kept + one_layer + 2 * tokens * model.vocabulary * FP32,
    }


def _fsdp(model: Model, config: DictConfig) -> dict[str, float]:
    """The same of an FSDP2 rank, gradients checkpointed; float32 gradients and optimizer, a layer gathered."""
    tokens = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    share = FP32 * (model.embeddings + model.attention + model.feed_forward) / device_count(config)
    gathered = BF16 * ((model.attention + model.feed_forward) / model.layers + model.embeddings)
    activations = tokens * model.hidden * (model.layers + 8) * BF16 + 2 * tokens * model.vocabulary * FP32
    return {"weights": share + gathered, "gradients": share, "optimizer": 2 * share, "activations": activations}


def memory_of_a_device(config: DictConfig) -> Iterator[str]:
    if (found := device_memory(config)) is None:
        return
    if found.longest_responses < 1:
        said = f"{found.weights:.0f} GiB of weights and a KV cache of {found.cache_tokens} tokens on a die"
        remedy = "raise rollout.tensor_model_parallel_size or gpu_memory_utilization"
        yield f"{said}: less than one longest response: {remedy} [memory.kv_cache]"
    if (total := sum(found.training.values())) > found.device:
        remedy = "raise the actor's parallel sizes, or lower its ppo_max_token_len_per_gpu"
        yield f"about {total:.0f} GiB on each die of {found.device}: training does not fit: {remedy} [memory.training]"


def describe_device_memory(config: DictConfig) -> str:
    """The estimates in three lines."""
    if (found := device_memory(config)) is None:
        return "no estimate of a device's memory: no accelerator, or no config.json of the model"
    return (
        f"rollout, a die of {found.device} GiB: weights {found.weights:.1f} GiB, KV cache {found.cache:.1f} GiB = "
        f"{found.cache_tokens:,} tokens = {found.longest_responses:.1f} longest responses\n"
        f"training: {listed(found.training)} GiB, in all {sum(found.training.values()):.1f}\n"
        f"machine: {found.offloaded:.0f} GiB of memory for what is offloaded; a checkpoint has "
        f"{found.checkpoint:.0f} GiB"
    )


def listed(parts: dict[str, float]) -> str:
    return ", ".join(f"{name} {gib:.1f}" for name, gib in parts.items() if gib)


# A machine besides its devices.
SHARED_MEMORY = Path("/dev/shm")
# What one vLLM engine maps (vllm/v1/executor/multiproc_executor.py, vllm/distributed/parallel_state.py): ten chunks of
# 16 MiB for what it tells its ranks, ten of 24 MiB for what each rank answers, six of 4 MiB among the ranks.
ENGINE_MIB, RANK_MIB, GROUP_MIB = 160, 240, 24
RAY_BYTES = 10**10  # from here on Ray keeps its objects in shared memory, below on disk (REQUIRE_SHM_SIZE_THRESHOLD)
AUTOMATON_BYTES = 102  # of a token: sam.automaton.store's blocks, which numba makes slow to import
NETWORK_CARDS = ("GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def memory_and_disk(config: DictConfig) -> Iterator[str]:
    least = config.get("machine") or {}  # what configs for a CPU say that a run needs
    parts = memory_parts(config)
    wanted = max(least.get("memory_gib", 0), sum(parts.values()))
    if (free := free_memory_gib()) < wanted:
        said = f"{free:.1f} GiB of memory are free, {wanted:.0f} are needed ({listed(parts) or 'of the config'})"
        yield f"{said}: stop other programs, take more nodes, or lower what the line names [machine.memory]"
    place = present(config)
    one, kept = found.checkpoint if (found := device_memory(config)) else 0.0, checkpoints_at_once(config)
    wanted = max(least.get("disk_gib", 0), one * kept)
    if (free := free_gib(place)) < wanted:
        said = f"{free:.1f} GiB of disk are free below {place}, {wanted:.0f} are needed"
        said += f" for {kept} checkpoints of {one:.0f} GiB" * (one > 0)
        yield f"{said}: free some, set run_dir, or lower trainer.max_actor_ckpt_to_keep [machine.disk]"
    wanted = sum((parts := shared_memory_parts(config)).values())
    if SHARED_MEMORY.is_dir() and (free := free_gib(SHARED_MEMORY)) < wanted:
        said = f"{free:.1f} GiB are free in {SHARED_MEMORY}, {wanted:.1f} are needed ({listed(parts)})"
        yield f"{said}: start the container with --shm-size={math.ceil(wanted)}g or more [machine.shared_memory]"
    there = sorted(psutil.net_if_addrs())
    for variable in NETWORK_CARDS:
        card = os.environ.get(variable, "").strip()
        names = tuple(name for name in card.lstrip("=").split(",") if name)  # = is exactly this, ^ none of these
        if names and not card.startswith("^") and not any(one.startswith(names) for one in there):
            said = f"{variable}={card}: no such network card on this node"
            yield f"{said}: set it to one of {', '.join(there)} [variable.refused]"


def present(config: DictConfig) -> Path:
    """run_dir, or what is there already of the folders above it."""
    run_directory = Path(config.run_dir).absolute()
    return next(path for path in (run_directory, *run_directory.parents) if path.exists())


def free_memory_gib() -> float:
    return psutil.virtual_memory().available / GIB


def free_gib(place: Path) -> float:
    return shutil.disk_usage(place).free / GIB


def memory_parts(config: DictConfig) -> dict[str, float]:
    """GiB that each use of a node's memory takes at most, where it can be said before the run."""
    speculation, rollout = config.speculation, config.actor_rollout_ref.rollout
    engines = max(1, config.trainer.n_gpus_per_node // rollout.tensor_model_parallel_size)
    # If every response of a round were as long as it may be.
    round_gib = config.data.gen_batch_size * rollout.n * longest_sequence(config) * AUTOMATON_BYTES / GIB
    automata = engines * min(speculation.memory_budget_mib / 1024, round_gib)
    is_shared = speculation.sharing == "replicas"
    return {
        "what devices hand over between updates": found.offloaded if (found := device_memory(config)) else 0.0,
        "drafters' automata": automata * (speculation.method in sharing.METHODS),
        "sharing's log": sharing.needed_mib(config) / 1024 if is_shared else 0.0,  # it may be on any node
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
    is_cpu, ranks = config.trainer.device == "cpu", min(rollout.tensor_model_parallel_size, devices)
    has_queues = rollout.engine_kwargs.vllm.get("distributed_executor_backend") != "uni"
    queue_mib = ENGINE_MIB + RANK_MIB * ranks + GROUP_MIB * (ranks > 1)
    bucket_mib = rollout.checkpoint_engine.update_weights_bucket_megabytes
    starts_ray_later = not is_cpu and not os.environ.get("RAY_ADDRESS")
    return {
        "vLLM's queues between ranks": devices // ranks * queue_mib / 1024 * has_queues,
        "verl's weight sync": devices * bucket_mib / 1024 * is_cpu,  # on devices it goes from device to device
        "Ray's objects": RAY_BYTES / GIB * starts_ray_later,
    }


# The Ray cluster that a run would join.
RESOURCES = {"npu": "NPU", "cuda": "GPU", "cpu": "CPU"}
ANSWER_SECONDS = 180.0  # a node imports Ray, reads the headers of all shards from the shared file system
CONNECT_SECONDS = 5.0  # a head that takes longer to accept a connection is not there
COMPARED = ("commit", "python", *versions.RECORDED)
START = "bash scripts/start_ray_cluster.sh head here, worker HEAD_ADDRESS on the other nodes"


def start(config: DictConfig) -> Iterator[str]:
    """Whether this node is the head of a Ray that runs; nothing is asked of a run that starts a Ray of its own."""
    if not (address := os.environ.get("RAY_ADDRESS")):
        if config.trainer.nnodes > 1:
            running = cluster_of_this_node()
            remedy = f"use the script in scripts/, or export RAY_ADDRESS={running}" if running else START
            yield f"RAY_ADDRESS is not set, trainer.nnodes={config.trainer.nnodes}: {remedy} [ray.head]"
        return
    if address == "auto":
        # Ray then looks for its own processes, which only the cluster's nodes have.
        address = _noted_address() or address
    if address in ("auto", "local"):
        return
    said, (host, _, port) = f"RAY_ADDRESS={address}", address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        yield f"{said}: expected HOST:PORT, such as 10.0.0.1:6379: set or unset it [ray.head]"
    elif not is_here(host):
        yield f"{said}: this is {platform.node()}, not its head: start the run on {host} [ray.head]"
    elif not answers(host, int(port)):
        yield f"{said}: nothing answers there: {START} [ray.head]"


def cluster_of_this_node() -> str | None:
    """HOST:PORT of the cluster that `ray start` made this node join, if its head answers."""
    host, _, port = (address := _noted_address()).rpartition(":")
    return address if host and port.isdigit() and answers(host, int(port)) else None


def _noted_address() -> str:
    """What `ray start` writes down on every node; `ray stop` removes it."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    with contextlib.suppress(OSError):
        return (Path(folder) / "ray" / "ray_current_cluster").read_text().strip()
    return ""


def is_here(host: str) -> bool:
    """Whether an address is this machine's: a program could listen there."""
    host = host.strip("[]")
    with contextlib.suppress(OSError):
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
        return True
    return False


def answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), port), CONNECT_SECONDS):
        return True
    return False


def ray_cluster(config: DictConfig, of_node: Callable[[dict, dict], list[str]]) -> Iterator[str]:
    """With RAY_ADDRESS set: whether the cluster has the devices, free and on as many nodes, and every node the rest.

    `of_node` runs on each node and finds the lines about it, of a config's content and what `differences` takes.
    """
    if not (address := os.environ.get("RAY_ADDRESS")):
        return
    # As scripts/ascend_environment.sh has it; Ray 2.60 takes an old token in ~/.ray otherwise.
    has_token = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    os.environ.setdefault("RAY_AUTH_MODE", "token" if has_token else "disabled")
    import ray

    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
    except Exception as error:
        remedy = "start the cluster again with scripts/start_ray_cluster.sh, or unset RAY_ADDRESS"
        yield f"RAY_ADDRESS={address}: {first_line(error)}: {remedy} [ray.head]"
        return
    try:
        alive = [node for node in ray.nodes() if node["Alive"]]
        yield from devices_of_cluster(config, alive, ray.available_resources())
        with tempfile.NamedTemporaryFile(dir=present(config), prefix=".sam-") as seen_by_all:
            head = {"versions": versions.known(), "file": seen_by_all.name}
            found = ask_nodes(config, alive, of_node, head)
        for line in dict.fromkeys(line for lines in found.values() for line in lines):
            places = [address for address, lines in found.items() if line in lines]
            yield f"on {'every node' if len(places) == len(found) > 1 else ', '.join(places)}: {line}"
    except OSError as error:
        yield f"run_dir={config.run_dir}: {error}: choose one that can be written to [run_dir.not_shared]"
    finally:
        ray.shutdown()


def devices_of_cluster(config: DictConfig, nodes: list[dict], available: dict[str, float]) -> Iterator[str]:
    resource, wanted, whole = RESOURCES[config.trainer.device], config.trainer.nnodes, config.trainer.n_gpus_per_node
    counts = sorted((int(node["Resources"].get(resource, 0)) for node in nodes), reverse=True)
    if (complete := sum(count >= whole for count in counts)) < wanted:
        said = f"{complete} of {wanted} nodes with {whole} {resource}, found {counts}"
        yield f"{said}: bash scripts/start_ray_cluster.sh worker on the others [ray.devices]"
    elif (free := int(available.get(resource, 0))) < wanted * whole:
        yield f"{free} of {wanted * whole} {resource} are free: wait for the other run or stop it [ray.devices]"


def differences(head: dict) -> Iterator[str]:
    """What this node has otherwise than the head, which tells its `versions` and a `file` in run_dir or above it."""
    own = versions.known()
    for name in COMPARED:
        if own[name] != (wanted := head["versions"][name]):
            yield f"{name} {own[name]}, the head has {wanted}: install the same on every node [node.differs]"
    if not Path(head["file"]).exists():
        said = (
            f"{Path(head['file']).parent} is another folder than the head's: a rank's part of a checkpoint stays here"
        )
        yield f"{said}: set run_dir to a folder that all nodes share [run_dir.not_shared]"


def ask_nodes(
    config: DictConfig, nodes: list[dict], of_node: Callable[[dict, dict], list[str]], head: dict
) -> dict[str, list[str]]:
    """The lines about each node, by its address."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask, asked, found = ray.remote(num_cpus=0, max_retries=0)(of_node), {}, {}
    for node in nodes:
        there = ask.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
        asked[node["NodeManagerAddress"]] = there.remote(OmegaConf.to_container(config), head)
    for address, answer in asked.items():
        try:
            found[address] = ray.get(answer, timeout=ANSWER_SECONDS)
        except Exception as error:
            remedy = "install the project and the pins of requirements/ on that node"
            found[address] = [f"preflight cannot run: {str(error).strip().splitlines()[-1]}: {remedy} [ray.node]"]
    return found


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
