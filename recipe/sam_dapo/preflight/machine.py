"""What machines must have: memory of their devices and their own, disk, shared memory, and a Ray cluster.

Estimates come from the model's config.json and the parallel sizes alone: communication buffers, fragmentation and
CANN's or CUDA's own memory are not in them. GiB are 2**30 bytes.
"""

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
from omegaconf import DictConfig, OmegaConf

from recipe.sam_dapo.launch import versions
from sam.trained_drafter import settings_of

GIB = 2**30
DEVICE_GIB = {"npu": 64, "cuda": 80}  # of one device: an A3 die, an H100
BF16, FP32 = 2, 4
OPTIMIZER = 3 * FP32  # master weights and two moments: Megatron's distributed optimizer, and what FSDP2 saves


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
        said = f"no {device} device here, so packages, memory and disk were not looked at"
        yield f"{said}: {ELSEWHERE[device]} [machine.device]"


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


def device_count(config: DictConfig) -> int:
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def longest_sequence(config: DictConfig) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def uses_megatron(config: DictConfig) -> bool:
    """By the section that the choice of training composed: actor.strategy may be misspelt."""
    return "megatron" in config.actor_rollout_ref.actor


def parameters(model: dict) -> tuple[float, float, float]:
    """Of a Qwen3, dense or with experts: embeddings; attention and all else over all layers; feed-forward parts."""
    hidden, layers, heads = model["hidden_size"], model["num_hidden_layers"], model["num_attention_heads"]
    experts, head_size = model.get("num_experts", 0), model.get("head_dim") or hidden // heads
    intermediate = model["moe_intermediate_size"] if experts else model["intermediate_size"]
    return (
        model["vocab_size"] * hidden * (1 if model.get("tie_word_embeddings") else 2),
        layers * hidden * (2 * head_size * (heads + model["num_key_value_heads"]) + experts + 2),
        layers * 3 * hidden * intermediate * max(1, experts),
    )


def device_memory(config: DictConfig) -> DeviceMemory | None:
    """None for a CPU, and where config.json is not there or has no sizes."""
    model = settings_of(Path(config.actor_rollout_ref.model.path).expanduser())
    try:
        embeddings, attention, feed_forward = parameters(model)
    except (KeyError, TypeError, ZeroDivisionError):
        return None
    if config.trainer.device not in DEVICE_GIB:
        return None
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    has_experts, device = "num_experts" in model, DEVICE_GIB[config.trainer.device]
    layers, hidden, dies = model["num_hidden_layers"], model["hidden_size"], device_count(config)
    heads, everything = model["num_attention_heads"], embeddings + attention + feed_forward
    head_size, logits = model.get("head_dim") or hidden // heads, 2 * model["vocab_size"] * FP32
    # Tensor-parallel ranks split attention and, without experts over ranks, everything.
    tensor, experts = rollout.tensor_model_parallel_size, rollout.expert_parallel_size
    weights = BF16 * ((embeddings + attention) / tensor + feed_forward / max(has_experts * experts, tensor))
    cache = max(0.0, rollout.gpu_memory_utilization * device * GIB - weights)
    of_token = 2 * layers * model["num_key_value_heads"] * head_size * BF16  # keys and values, over all heads
    cache_tokens = int(cache / (of_token / min(tensor, model["num_key_value_heads"])))
    tokens, is_megatron = actor.ppo_max_token_len_per_gpu, uses_megatron(config)
    if is_megatron:  # full recomputation, sequence parallelism; bf16 weights are saved beside the optimizer
        names = ("tensor_model", "pipeline_model", "context", "expert_model")
        tensor, pipeline, context, experts = (actor.megatron[f"{name}_parallel_size"] for name in names)
        tokens /= tensor
        split = (experts if has_experts else tensor) * pipeline
        data = context * max(1, dies // (tensor * pipeline * context))
        common, forward = (attention + embeddings) / (tensor * pipeline), feed_forward / split
        sizes = {"weights": BF16 * (common + forward), "gradients": FP32 * (common + forward)}
        sizes["optimizer"] = OPTIMIZER * (common / data + forward / (max(1, dies // split) if has_experts else data))
        sizes["activations"] = tokens * (BF16 * (hidden * (layers / pipeline + 8) + 6 * head_size * heads) + logits)
        saved, settings, resting = BF16 + OPTIMIZER, actor.megatron, sizes["weights"]
    else:  # FSDP2 with checkpointed gradients: weights, gradients and optimizer in float32, and a layer gathered
        share = FP32 * everything / dies
        gathered = BF16 * ((attention + feed_forward) / layers + embeddings)
        sizes = {"weights": share + gathered, "gradients": share, "optimizer": 2 * share}
        sizes["activations"] = tokens * (hidden * (layers + 8) * BF16 + logits)
        saved, settings, resting = OPTIMIZER, actor.fsdp_config, share
    offloaded = resting * settings.param_offload + sizes["optimizer"] * settings.optimizer_offload
    return DeviceMemory(
        device, weights / GIB, cache / GIB, cache_tokens, cache_tokens / longest_sequence(config),
        {name: size / GIB for name, size in sizes.items()}, saved * everything / GIB,
        config.trainer.n_gpus_per_node * offloaded / GIB,
    )  # fmt: skip


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
    if (found := device_memory(config)) is None:
        return "no estimate of a device's memory: no accelerator, or no config.json of the model"
    training = ", ".join(f"{name} {gib:.1f}" for name, gib in found.training.items())
    return (
        f"rollout, a die of {found.device} GiB: weights {found.weights:.1f} GiB, KV cache {found.cache:.1f} GiB = "
        f"{found.cache_tokens:,} tokens = {found.longest_responses:.1f} longest responses; training: {training} GiB, "
        f"in all {sum(found.training.values()):.1f}; a checkpoint has {found.checkpoint:.0f} GiB"
    )


SHARED_MEMORY = Path("/dev/shm")
RANK_GIB = 0.3  # of shared memory, at most: an engine's queues for each of its ranks (vLLM's multiproc_executor.py)


def memory_and_disk(config: DictConfig) -> Iterator[str]:
    least = config.get("machine") or {}  # what configs for a CPU say that a run needs
    trainer, rollout, place = config.trainer, config.actor_rollout_ref.rollout, present(config)
    one, offloaded = (found.checkpoint, found.offloaded) if (found := device_memory(config)) else (0.0, 0.0)
    # verl removes an old checkpoint before it writes the next, but never the only one.
    written = math.inf if trainer.total_training_steps is None else trainer.total_training_steps // trainer.save_freq
    kept = min(max(2, trainer.max_actor_ckpt_to_keep or 100), max(1, written)) * (trainer.save_freq > 0)
    shared = RANK_GIB * trainer.n_gpus_per_node
    if trainer.device == "cpu":  # weights go through it; from device to device elsewhere
        shared = trainer.n_gpus_per_node * rollout.checkpoint_engine.update_weights_bucket_megabytes / 1024
    for what, free, wanted, of, remedy, code in (
        ("memory", free_memory_gib(), max(least.get("memory_gib", 0), offloaded),
         "machine.memory_gib, and what devices hand over", "stop other programs, or take more nodes", "memory"),
        (f"disk below {place}", free_gib(place), max(least.get("disk_gib", 0), one * kept),
         f"machine.disk_gib, and {kept} checkpoints of {one:.0f} GiB", "free some, set run_dir, or keep fewer", "disk"),
        (f"{SHARED_MEMORY}", free_gib(SHARED_MEMORY), shared, "what processes hand over",
         f"start the container with --shm-size={math.ceil(shared)}g or more", "shared_memory"),
    ):  # fmt: skip
        if free < wanted:
            said = f"{free:.1f} GiB of {what} are free, {wanted:.1f} are needed ({of})"
            yield f"{said}: {remedy} [machine.{code}]"


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


def ray_cluster(config: DictConfig, of_node: Callable[[dict, dict], list[str]]) -> Iterator[str]:
    """With RAY_ADDRESS set: whether the cluster has as many nodes, and every node what it needs.

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
        nodes = [node for node in ray.nodes() if node["Alive"]]
        if len(nodes) < config.trainer.nnodes:
            yield f"{len(nodes)} of {config.trainer.nnodes} nodes are there: {START} [ray.devices]"
        with tempfile.NamedTemporaryFile(dir=present(config), prefix=".sam-") as seen_by_all:
            found = ask_nodes(config, nodes, of_node, {"versions": versions.known(), "file": seen_by_all.name})
        for line in dict.fromkeys(line for lines in found.values() for line in lines):
            places = [address for address, lines in found.items() if line in lines]
            yield f"on {'every node' if len(places) == len(found) > 1 else ', '.join(places)}: {line}"
    except Exception as error:  # Ray's, or a run_dir that cannot be written to
        yield f"RAY_ADDRESS={address}, run_dir={config.run_dir}: {first_line(error)}: {START} [ray.head]"
    finally:
        ray.shutdown()


def ask_nodes(config: DictConfig, nodes: list[dict], of_node: Callable, head: dict) -> dict[str, list[str]]:
    """The lines about each node, by its address."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ask, content, asked, found = ray.remote(num_cpus=0, max_retries=0)(of_node), OmegaConf.to_container(config), {}, {}
    for node in nodes:
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        asked[node["NodeManagerAddress"]] = ask.options(scheduling_strategy=there).remote(content, head)
    for address, answer in asked.items():
        try:
            found[address] = ray.get(answer, timeout=ANSWER_SECONDS)
        except Exception as error:
            found[address] = [f"preflight cannot run: {str(error).strip().splitlines()[-1]}: {INSTALL} [ray.node]"]
    return found


def differences(head: dict) -> Iterator[str]:
    """What this node has otherwise than the head, which tells its `versions` and a `file` in run_dir or above it."""
    own, file = versions.known(), Path(head["file"])
    for name in COMPARED:
        if own[name] != (wanted := head["versions"][name]):
            yield f"{name} {own[name]}, the head has {wanted}: install the same on every node [node.differs]"
    if not file.exists():
        said = f"{file.parent} is another folder than the head's: a rank's part of a checkpoint stays here"
        yield f"{said}: set run_dir to a folder that all nodes share [run_dir.not_shared]"


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
