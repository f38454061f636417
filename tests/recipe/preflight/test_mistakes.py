"""What a user may get wrong before 32 dies are taken: each mistake alone on a node that is good otherwise, and what
preflight says of it."""

import functools
import json
import os
import platform
import shutil

import psutil
import pytest
import ray

from recipe.launch import config as config_module
from recipe.launch import source_patches, versions
from recipe.launch.config import compose_config
from recipe.preflight import ascend, checks, machine
from recipe.preflight.problem import Problem
from tests.recipe.preflight.preflight_node import code_of, good_node, join_cluster, problems

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
LOSSY, GRAPH_MODE = f"{VLLM}.additional_config", f"{VLLM}.compilation_config.cudagraph_mode"
GRAPHS = (f"{ROLLOUT}.enforce_eager=false",)
NOT_COMPILED, TWO_RANKS = f"+{VLLM}.compilation_config.mode=0", f"{ROLLOUT}.data_parallel_size=2"
ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
CUDA = ("device=cuda", "training=fsdp2", "trainer.n_gpus_per_node=16", f"{ATTENTION}=flash_attention_2")
NOT_PATCHED = Problem("ascend.patches", "vllm-ascend 0.23.0.post1 is not patched")


@pytest.fixture
def node(tmp_path, monkeypatch):
    return good_node(tmp_path, monkeypatch)


# Each of these makes a function that spoils a node and returns the overrides that the mistake consists of, if any.
def config(*overrides):
    return lambda node: overrides


def variable(name, value, *overrides):
    def spoil(node):
        if value is None:
            node.monkeypatch.delenv(name, raising=False)
        else:
            node.monkeypatch.setenv(name, value)
        return overrides

    return spoil


def without(path):
    return lambda node: (node.folder / path).unlink()


def written(path, text):
    return lambda node: (node.folder / path).write_text(text) and None


def installed(package, version, *overrides):
    def spoil(node):
        known = versions.installed
        node.set(versions, "installed", lambda name: version if name == package else known(name))
        return overrides

    return spoil


def not_importable(module, *overrides):
    def spoil(node):
        node.set(checks, "is_importable", lambda name: name != module)
        return overrides

    return spoil


def no_patches(node):
    (series,) = source_patches.load()
    series.installed, series.states = series.version, dict.fromkeys(series.hashes, "published")
    node.set(source_patches, "load", lambda: [series])


def free(name, gibibytes, shared=4000.0):
    """GiB that machine's function of that name finds, in shared memory others."""
    return lambda node: node.set(
        machine, name, lambda place=None: shared if place == machine.SHARED_MEMORY else gibibytes
    )


def cluster(dies, free=None, said=None):
    return lambda node: join_cluster(node, dies, free, said)


def ray_refuses(node):
    @functools.wraps(ray.init)
    def refuse(**_):
        raise ConnectionError("version mismatch: the cluster has Ray 2.41.0")

    node.set(ray, "init", refuse)


def a_run_goes_on(node):
    holder = {"pid": os.getpid(), "host": platform.node(), "started": psutil.Process().create_time(), "since": "12:00"}
    (node.folder / "run").mkdir()
    (node.folder / "run" / "running.json").write_text(json.dumps(holder))
    return (f"run_dir={node.folder}/run",)


def misspelt_yaml(node):
    folder = node.folder / "configs"
    shutil.copytree(config_module.CONFIGS, folder)
    with open(folder / "shared" / "math.yaml", "a") as file:
        file.write("  tset_freq: 10\n")
    node.set(config_module, "CONFIGS", folder)


MISTAKES = [
    # What cannot be composed.
    ("a drafter that is not there", config("speculation=eagle"), "config.override"),
    ("a knob misspelt", config("speculation.num_speculative_token=3"), "config.override"),
    ("a key misspelt", config(f"{ROLLOUT}.max_num_seq=8"), "config.override"),
    ("a key added that nothing reads", config("+trainer.nodes=2"), "config.unknown_key"),
    ("a scale that is not there", config("scale=tiny"), "config.override"),
    # What nothing would read, or verl and vLLM would refuse after minutes.
    ("a key misspelt in a YAML file", misspelt_yaml, "config.unknown_key"),
    ("a Megatron key misspelt", config(f"+{ACTOR}.megatron.tensor_paralel=8"), "config.verl"),
    ("an estimator misspelt", config("algorithm.adv_estimator=grop"), "config.verl"),
    ("a loss misspelt", config(f"{ACTOR}.loss_agg_mode=token"), "config.verl"),
    ("a strategy misspelt", config(f"{ACTOR}.strategy=megatorn"), "config.refused"),
    ("an argument vLLM lacks", config(f"+{VLLM}.max_number_of_seqs=3"), "vllm.arguments"),
    ("a graph mode misspelt", config(f"{VLLM}.compilation_config.cudagraph_mode=FULLL"), "vllm.arguments"),
    ("an unknown ray.init key", config("+ray_kwargs.ray_init.num_npus=16"), "config.ray_init"),
    # Data and model.
    ("a hub's name for a folder", variable("MODEL_PATH", "Qwen/Qwen3-32B"), "model.missing"),
    ("no tokenizer settings", without("model/tokenizer_config.json"), "model.missing"),
    ("a vocabulary cut off", written("model/tokenizer.json", '{"model": {'), "model.tokenizer"),
    ("a shard missing", without("model/model-00001-of-00002.safetensors"), "model.missing"),
    # Sizes.
    ("TP that divides nothing", config(f"{ROLLOUT}.tensor_model_parallel_size=6"), "parallel.rollout"),
    ("experts on some", config(f"{ROLLOUT}.expert_parallel_size=4"), "parallel.expert"),
    ("another size for vLLM", config(f"+{VLLM}.data_parallel_size=2"), "parallel.engine_kwargs"),
    ("CP that divides nothing", config(f"{ACTOR}.megatron.context_parallel_size=3"), "parallel.megatron"),
    ("updates too small", config(f"{ACTOR}.ppo_max_token_len_per_gpu=9216"), "tokens.update"),
    ("small steps", config(f"{ROLLOUT}.max_num_batched_tokens=256"), "tokens.rollout"),
    ("no room for the cache", config(f"{ROLLOUT}.tensor_model_parallel_size=1"), "memory.kv_cache"),
    ("no room to train", config(f"{ACTOR}.megatron.tensor_model_parallel_size=1"), "memory.training"),
    # What the recipe does not run with.
    ("a drafter without a switch", config("speculation=hybrid", "speculation.draft_model=/x"), "config.refused"),
    ("a pool", config(f"+{VLLM}.kv_transfer_config={{kv_connector:AscendStoreConnector}}"), "config.refused"),
    ("KV cache in memory of the host", config(f"+{VLLM}.kv_offloading_size=4"), "config.refused"),
    # Packages, patches, settings that change what is sampled.
    ("another vLLM", installed("vllm", "0.24.0"), "package.version"),
    ("no Arctic Inference", installed("arctic-inference", None, "speculation=suffix"), "package.version"),
    ("an old CANN", written("cann/aarch64-linux/ascend_toolkit_install.info", "version=8.3.RC1\n"), "package.version"),
    ("no patches", no_patches, "ascend.patches"),
    ("no Megatron-Bridge", not_importable("megatron.bridge"), "package.megatron"),
    ("no flash-attn", not_importable("flash_attn", *CUDA), "package.flash_attention"),
    ("sequences split without it", config(*CUDA, f"{ATTENTION}=sdpa"), "package.flash_attention"),
    ("no CANN", variable("ASCEND_HOME_PATH", "/nowhere"), "package.version"),
    ("another torch-npu", installed("torch-npu", "0.1"), "package.version"),
    ("block verification", config(f"+{LOSSY}.rejection_sampler_config.enable_block_verify=true"), "vllm.arguments"),
    ("graphs without compilation", config(*GRAPHS, f"{GRAPH_MODE}=FULL", NOT_COMPILED), "ascend.graph_mode"),
    ("graphs of parallel ranks", config(*GRAPHS, f"{GRAPH_MODE}=FULL_DECODE_ONLY", TWO_RANKS), "ascend.graph_mode"),
    # Variables.
    ("an HCCL variable misspelt", variable("HCCL_CONECT_TIMEOUT", "1800"), "environment.misspelt"),
    ("a network card of elsewhere", variable("GLOO_SOCKET_IFNAME", "enp189s0f0"), "machine.network_card"),
    ("Kubernetes' VLLM_PORT", variable("VLLM_PORT", "tcp://10.0.0.1:8000"), "machine.vllm_port"),
    ("plugins left out", variable("VLLM_PLUGINS", "ascend", *CUDA), "drafter.plugin"),
    ("the other model runner", variable("VLLM_USE_V2_MODEL_RUNNER", "1", *CUDA), "drafter.plugin"),
    # The machine.
    ("Docker's shared memory", free("free_gib", 4000.0, 0.06), "machine.shared_memory"),
    ("a full disk", free("free_gib", 500.0), "machine.disk"),
    ("too little memory", free("free_memory_gib", 100.0), "machine.memory"),
    # Where the run starts.
    ("no Ray", variable("RAY_ADDRESS", None), "ray.no_head"),
    ("not the head", variable("RAY_ADDRESS", "198.51.100.7:6379"), "ray.not_head"),
    ("an address without port", variable("RAY_ADDRESS", "127.0.0.1"), "ray.address"),
    ("another Ray", ray_refuses, "ray.refused"),
    ("a node missing", cluster([16]), "ray.nodes_missing"),
    ("another run on the cluster", cluster([16, 16], free=16), "ray.devices_taken"),
    ("a node without patches", cluster([16, 16], said={"10.0.0.1": [], "10.0.0.2": [NOT_PATCHED]}), "ascend.patches"),
    ("the same run twice", a_run_goes_on, "run_dir.in_use"),
]  # fmt: skip


def test_a_good_node_has_no_problem(node):
    assert problems() == []
    assert problems(*CUDA) == []
    for mode in ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"):
        warned = list(
            ascend.find_warnings(composed := compose_config("dapo_qwen3_32b", [*GRAPHS, f"{GRAPH_MODE}={mode}"]))
        )
        assert list(ascend.graph_problems(composed)) == warned == []
    (warning,) = ascend.find_warnings(
        compose_config("dapo_qwen3_32b", [*GRAPHS, f"{GRAPH_MODE}=FULL_DECODE_ONLY", "speculation=ngram"])
    )
    assert f"set {GRAPH_MODE}=FULL" in warning


@pytest.mark.parametrize(("spoil", "code"), [row[1:] for row in MISTAKES], ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_found(node, spoil, code):
    found = problems(*(spoil(node) or ()))
    assert code in map(code_of, found), found
    assert len(found) <= 3 and all("\n" not in problem for problem in found), found


def test_a_line_has_the_value_what_is_wrong_and_what_to_do(node):
    assert problems("data.train_batch_size=31")[0] == (
        "data.train_batch_size=31, actor.ppo_mini_batch_size=32: the batch is not a multiple of the mini-batch: change "
        "one [batch.mini]"
    )
    free("free_gib", 4000.0, 0.06)(node)
    (line,) = problems()
    assert line.startswith("0.1 GiB are free in /dev/shm, 4.1 are needed (vLLM's queues between ranks 4.1): ")
    assert line.endswith(": start the container with --shm-size=5g or more [machine.shared_memory]")
