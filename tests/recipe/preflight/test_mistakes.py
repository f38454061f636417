"""What a user may get wrong before 32 dies are taken: each mistake alone on a node that is good otherwise, and what
preflight says of it."""

import functools
import json
import os
import platform
import shutil
import socket

import pandas
import psutil
import pytest
import ray

from recipe.launch import config as config_module
from recipe.launch import source_patches, versions
from recipe.preflight import checks, machine
from recipe.preflight import cluster as cluster_check
from recipe.preflight.problem import Problem
from tests.recipe.preflight.preflight_node import good_node, join_cluster, problems

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
CUDA = ("device=cuda", "training=fsdp2", "trainer.n_gpus_per_node=16", f"{ATTENTION}=flash_attention_2")
UNPATCHED = "vllm-ascend 0.23.0.post1 is not patched: run python scripts/patch.py apply"
NOT_PATCHED = Problem("ascend.patches", UNPATCHED)


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


def installed(package, version):
    def spoil(node):
        known = versions.installed
        node.set(versions, "installed", lambda name: version if name == package else known(name))

    return spoil


def not_importable(module, *overrides):
    def spoil(node):
        node.set(checks, "is_importable", lambda name: name != module)
        return overrides

    return spoil


def series_in_state(*states):
    """The patched files in these states, the last one for all that follow."""

    def spoil(node):
        (series,) = source_patches.load()
        series.installed = series.version
        series.states = {name: states[min(at, len(states) - 1)] for at, name in enumerate(series.hashes)}
        node.set(source_patches, "load", lambda: [series])

    return spoil


def free(what, gibibytes, *overrides):
    def spoil(node):
        known = machine.free_gib
        if what == "memory":
            node.set(machine, "free_memory_gib", lambda: gibibytes)
        else:
            is_shared = what == "shared memory"
            node.set(
                machine,
                "free_gib",
                lambda place: gibibytes if (place == machine.SHARED_MEMORY) == is_shared else known(place),
            )
        return overrides

    return spoil


def cluster(dies, free=None, said=None):
    return lambda node: join_cluster(node, dies, free, said)


def no_answer(node):
    node.set(cluster_check, "answers", lambda host, port: False)


def ray_refuses(node):
    @functools.wraps(ray.init)
    def refuse(**_):
        raise ConnectionError("version mismatch: the cluster has Ray 2.41.0")

    node.set(ray, "init", refuse)


def old_driver(node):
    node.monkeypatch.setattr("verl.utils.device.is_support_ipc", lambda: False)
    return free("shared memory", 20.0)(node)


def taken_port(node):
    listener = socket.create_server(("", 0))
    node.listener = listener  # open as long as the node lives
    node.monkeypatch.setenv("HCCL_HOST_SOCKET_PORT_RANGE", str(listener.getsockname()[1]))


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


def data_without_a_column(node):
    pandas.DataFrame({"prompt": ["x"]}).to_parquet(node.folder / "data" / "dapo_math_17k.parquet")


def truncated_shard(node):
    path = node.model / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def index_of_another_model(node):
    path = node.model / "model.safetensors.index.json"
    path.write_text(path.read_text().replace('"total_size": 768', '"total_size": 65527752704'))


MISTAKES = [
    # What cannot be composed.
    ("a drafter that is not there", config("speculation=eagle"), "Could not find 'speculation/eagle'"),
    ("too many draft tokens", config("speculation.num_speculative_tokens=16"), "expected an integer from 1 to 15"),
    ("a policy that is not there", config("speculation.policy=sometimes"), "expected one of threshold"),
    ("a knob misspelt", config("speculation.num_speculative_token=3"), "num_speculative_token"),
    ("a key misspelt", config(f"{ROLLOUT}.max_num_seq=8"), "max_num_seq"),
    ("a key added that nothing reads", config("+trainer.nodes=2"), "trainer.nodes is unknown to dapo_qwen3_32b"),
    ("a training that is not there", config("training=megatron"), "Could not find 'training/megatron'"),
    ("a scale that is not there", config("scale=tiny"), "Could not find 'scale/tiny'"),
    # What nothing would read, or verl and vLLM would refuse after minutes.
    ("a key misspelt in a YAML file", misspelt_yaml, "trainer.tset_freq is unknown to verl 0.9.1 and would be"),
    ("a Megatron key misspelt", config(f"+{ACTOR}.megatron.tensor_paralel=8"), "keyword argument 'tensor_paralel'"),
    ("a name that is a number", config("trainer.experiment_name=32"), "trainer.experiment_name=32: wandb takes texts"),
    ("a rotation of no policy", config("speculation.turns=[never,threshold]"), "policy_rotation='threshold'"),
    ("an estimator misspelt", config("algorithm.adv_estimator=grop"), "verl refuses the config: Unknown advantage"),
    ("a loss misspelt", config(f"{ACTOR}.loss_agg_mode=token"), "Invalid loss_agg_mode: token"),
    ("a strategy misspelt", config(f"{ACTOR}.strategy=megatorn"), "expected one of fsdp, fsdp2, megatron"),
    ("another engine", config(f"{ROLLOUT}.name=sglang"), "rollout.name=sglang: expected vllm"),
    ("an argument vLLM lacks", config(f"+{VLLM}.max_number_of_seqs=3"), "no such argument: did you mean max_num_seqs?"),
    ("a graph mode misspelt", config(f"{VLLM}.compilation_config.cudagraph_mode=FULLL"), "'FULLL' is none of the"),
    ("a type vLLM lacks", config(f"{ROLLOUT}.dtype=bf16"), "rollout.dtype=bf16: vLLM expects one of"),
    ("an unknown ray.init key", config("+ray_kwargs.ray_init.num_npus=16"), "ray_init.num_npus is unknown to ray.init"),
    # Data and model.
    ("data that are not there", config("data.train_files=no.parquet"), "data.train_files=no.parquet: no such file;"),
    ("data without a column", data_without_a_column, "column data_source is missing; make it with bash"),
    ("data that are a web page", written("data/aime_2024.parquet", "<html>"), "no parquet file"),
    ("a hub's name for a folder", variable("MODEL_PATH", "Qwen/Qwen3-32B"), "model.sh, or point the key at your"),
    ("no tokenizer settings", without("model/tokenizer_config.json"), "no tokenizer_config.json there; fetch the"),
    ("no vocabulary", without("model/tokenizer.json"), "neither tokenizer.json nor vocab.json there"),
    ("a vocabulary cut off", written("model/tokenizer.json", '{"model": {'), "its tokenizer does not load ("),
    ("a shard missing", without("model/model-00001-of-00002.safetensors"), "1 of 2 shards of model.saf"),
    ("a shard cut off", truncated_shard, "an interrupted copy: remove it, bash scripts/prepare_model.sh goes on"),
    ("another model's index", index_of_another_model, "says 65527752704: another model's index?"),
    # Sizes.
    ("an odd batch", config("data.train_batch_size=31"), "31 is not a multiple of actor.ppo_mini_batch_size=32"),
    ("rounds too small", config("data.gen_batch_size=16"), "data.gen_batch_size=16 is below data.train_batch_size=32"),
    ("groups of one", config(f"{ROLLOUT}.n=1"), "dynamic sampling compares the samples of a prompt"),
    ("a short context", config(f"{ROLLOUT}.max_model_len=20000"), "max_model_len=20000 is below"),
    ("a buffer too long", config("reward.reward_kwargs.overlong_buffer_cfg.len=99999"), "buffer_cfg.len=99999"),
    ("TP that divides nothing", config(f"{ROLLOUT}.tensor_model_parallel_size=6"), "divide the 32 devices: change"),
    ("experts on some", config(f"{ROLLOUT}.expert_parallel_size=4"), "experts over 1 or all 8 devices"),
    ("CP that divides nothing", config(f"{ACTOR}.megatron.context_parallel_size=3"), "= 48 does not divide the 32"),
    ("updates too small", config(f"{ACTOR}.ppo_max_token_len_per_gpu=9216"), "18432 is below the longest sequence"),
    ("small steps", config(f"{ROLLOUT}.max_num_batched_tokens=256"), "= 512, one step of full decoding"),
    ("no room for the cache", config(f"{ROLLOUT}.tensor_model_parallel_size=1"), "less than one longest response"),
    ("no room to train", config(f"{ACTOR}.megatron.tensor_model_parallel_size=1"), "GiB on each die of 64"),
    # Packages, patches, settings that change what is sampled.
    ("another vLLM", installed("vllm", "0.24.0"), "vllm 0.24.0: this recipe is written for vllm==0.23.0; install the"),
    ("another vllm-ascend", installed("vllm-ascend", "0.18.0"), "vllm-ascend 0.18.0: torch 2.10.0, torch-npu"),
    ("an old CANN", written("cann/aarch64-linux/ascend_toolkit_install.info", "version=8.3.RC1\n"), "CANN 8.3.RC1:"),
    ("no patches", series_in_state("published"), UNPATCHED),
    ("half the patches", series_in_state("patched", "published"), "is half patched: run python scripts/patch.py"),
    ("no Megatron-Bridge", not_importable("megatron.bridge"), "training with Megatron needs megatron.bridge,"),
    ("no flash-attn", not_importable("flash_attn", *CUDA), "flash-attn is not installed: install it, or set"),
    ("sequences split without it", config(*CUDA, f"{ATTENTION}=sdpa"), "verl splits sequences in flash_attention_2"),
    ("block verification", config(f"+{VLLM}.additional_config.rejection_sampler_config.enable_block_verify=true"),
     "enable_block_verify=True changes what is sampled: unset it"),
    ("asynchronous scheduling", config(f"+{VLLM}.async_scheduling=true"), "drafters on the host need the step's"),
    # Variables.
    ("an HCCL variable misspelt", variable("HCCL_CONECT_TIMEOUT", "1800"), "did you mean HCCL_CONNECT_TIMEOUT?"),
    ("a vLLM variable misspelt", variable("VLLM_LOGING_LEVEL", "INFO"), "did you mean VLLM_LOGGING_LEVEL?"),
    ("a network card of elsewhere", variable("GLOO_SOCKET_IFNAME", "enp189s0f0"), "this node has no such network card"),
    ("Kubernetes' VLLM_PORT", variable("VLLM_PORT", "tcp://10.0.0.1:8000"), "VLLM_PORT=tcp://10.0.0.1:8000: vLLM"),
    ("plugins left out", variable("VLLM_PLUGINS", "ascend", *CUDA), "VLLM_PLUGINS=ascend keeps vLLM from loading the"),
    ("the other model runner", variable("VLLM_USE_V2_MODEL_RUNNER", "1", *CUDA), "does not replace that model"),
    # The machine.
    ("Docker's shared memory", free("shared memory", 0.06), "start the container with --shm-size=5g or more"),
    ("a full disk", free("disk", 500.0), "2 checkpoints of 427 GiB each need 854: free some, set run_dir"),
    ("too little memory", free("memory", 100.0), "for what training keeps there between updates: stop other programs"),
    ("an HCCL port taken", taken_port, "1 of its ports are taken on this node"),
    ("an old driver", old_driver, "so they take 32 GiB of /dev/shm, 20.0 are free: update the driver"),
    # Where the run starts.
    ("no Ray", variable("RAY_ADDRESS", None), "no Ray runs on this node and RAY_ADDRESS is not set: run bash"),
    ("not the head", variable("RAY_ADDRESS", "198.51.100.7:6379"), "is not the head of the Ray cluster"),
    ("an address without port", variable("RAY_ADDRESS", "127.0.0.1"), "RAY_ADDRESS=127.0.0.1: expected HOST:PORT"),
    ("a Ray that has ended", no_answer, "nothing answers there, Ray has ended or was never started"),
    ("another Ray", ray_refuses, "no cluster answers (version mismatch: the cluster has Ray 2.41.0): start it with"),
    ("a node missing", cluster([16]), "1 of 2 nodes are in the Ray cluster with 16 NPU each (found: [16])"),
    ("another run on the cluster", cluster([16, 16], free=16), "16 of the 32 NPU that the run needs are free:"),
    ("a node without patches", cluster([16, 16], said={"10.0.0.1": [], "10.0.0.2": [NOT_PATCHED]}), "on 10.0.0.2: v"),
    ("the same run twice", a_run_goes_on, "is used by a run that goes on (process"),
]  # fmt: skip


def test_a_good_node_has_no_problem(node):
    assert problems() == []
    assert problems(*CUDA, name="dapo_qwen3_32b") == []


@pytest.mark.parametrize(("spoil", "message"), [row[1:] for row in MISTAKES], ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_found(node, spoil, message):
    found = problems(*(spoil(node) or ()))
    assert any(message in problem for problem in found), found
    assert len(found) <= 3 and all("\n" not in problem for problem in found), found
