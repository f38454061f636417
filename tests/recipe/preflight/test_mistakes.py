"""What a user may get wrong before 32 dies are taken: each mistake alone on a node that is good otherwise, and what
preflight says of it."""

import json
import os
import platform

import psutil
import pytest
import ray

from sam_recipe import preflight
from sam_recipe.launch import versions
from sam_recipe.patch import Patches
from sam_recipe.preflight import __main__ as report
from sam_recipe.preflight import compatibility, machine, vllm_command
from sam_recipe.preflight.npu_selftest import recommend, verifications
from tests.recipe.preflight.preflight_node import code_of, config_of, join_cluster, problems_of

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
COMPILATION = f"{VLLM}.compilation_config"
GRAPHS = (f"{ROLLOUT}.enforce_eager=false",)
TWO_RANKS = f"{ROLLOUT}.data_parallel_size=2"
ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
CUDA = ("device=cuda", "training=fsdp2", "trainer.n_gpus_per_node=16", f"{ATTENTION}=flash_attention_2")
NOT_PATCHED = "vllm-ascend 0.23.0.post1 is not patched: run python -m sam_recipe.patch apply [ascend.patches]"


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
    return lambda node: node.set(compatibility, "is_importable", lambda name: name != module) or overrides


def no_patches(node):
    node.set(Patches, "state", "published")


def free(name, gibibytes, shared=4000.0):
    """GiB that machine's function of that name finds, in shared memory others."""
    return lambda node: node.set(
        machine, name, lambda place=None: shared if place == machine.SHARED_MEMORY else gibibytes
    )


def cluster(dies, free=None, said=None):
    return lambda node: join_cluster(node, dies, free, said)


def ray_refuses(node):
    def refuse(**_):
        raise ConnectionError("version mismatch: the cluster has Ray 2.41.0")

    node.set(ray, "init", refuse)


def a_run_goes_on(node):
    holder = {"pid": os.getpid(), "host": platform.node(), "started": psutil.Process().create_time(), "since": "12:00"}
    (node.folder / "run").mkdir()
    (node.folder / "run" / "running.json").write_text(json.dumps(holder))
    return (f"run_dir={node.folder}/run",)


MISTAKES = [
    # Data and model.
    ("a hub's name for a folder", config("actor_rollout_ref.model.path=Qwen/Qwen3-32B"), "model.missing"),
    ("no tokenizer settings", without("model/tokenizer_config.json"), "model.missing"),
    ("a shard missing", without("model/model-00001-of-00002.safetensors"), "model.missing"),
    # Sizes.
    ("TP that divides nothing", config(f"{ROLLOUT}.tensor_model_parallel_size=6"), "size.divides"),
    ("another size for vLLM", config(f"+{VLLM}.data_parallel_size=2"), "config.refused"),
    ("CP that divides nothing", config(f"{ACTOR}.megatron.context_parallel_size=3"), "size.divides"),
    ("experts that divide nothing", config(f"{ACTOR}.megatron.expert_model_parallel_size=3"), "size.divides"),
    ("updates too small", config(f"{ACTOR}.ppo_max_token_len_per_gpu=9216"), "size.least"),
    ("small steps", config(f"{ROLLOUT}.max_num_batched_tokens=256"), "size.least"),
    ("no room for the cache", config(f"{ROLLOUT}.tensor_model_parallel_size=1"), "memory.kv_cache"),
    ("no room to train", config(f"{ACTOR}.megatron.tensor_model_parallel_size=1"), "memory.training"),
    # What the recipe does not run with.
    ("a strategy misspelt", config(f"{ACTOR}.strategy=megatorn"), "config.refused"),
    ("little of a die", config(f"{ROLLOUT}.gpu_memory_utilization=0.13"), "memory.kv_cache"),
    ("a drafter without a switch", config("speculation.method=hybrid", "speculation.draft_model=/x"), "config.refused"),
    ("a pool", config(f"+{VLLM}.kv_transfer_config.kv_connector=AscendStoreConnector"), "config.refused"),
    ("KV cache in memory of the host", config(f"+{VLLM}.kv_offloading_size=4"), "config.refused"),
    ("graphs without compilation", config(*GRAPHS, f"+{COMPILATION}.mode=0"), "config.refused"),
    ("graphs of parallel ranks", config(*GRAPHS, f"{COMPILATION}.cudagraph_mode=FULL_DECODE_ONLY", TWO_RANKS),
     "config.refused"),
    ("sequences split without it", config(*CUDA, f"{ATTENTION}=sdpa", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_"
     "size=2"), "config.refused"),
    # Packages, patches, variables.
    ("another vLLM", installed("vllm", "0.24.0"), "package.version"),
    ("no Arctic Inference", installed("arctic-inference", None, "speculation.method=suffix"), "package.version"),
    ("an old CANN", written("cann/aarch64-linux/ascend_toolkit_install.info", "version=8.3.RC1\n"), "package.version"),
    ("no CANN", variable("ASCEND_HOME_PATH", "/nowhere"), "package.version"),
    ("another torch-npu", installed("torch-npu", "0.1"), "package.version"),
    ("no Megatron-Bridge", not_importable("megatron.bridge"), "package.version"),
    ("no flash-attn", not_importable("flash_attn", *CUDA), "package.version"),
    ("no patches", no_patches, "ascend.patches"),
    ("plugins left out", variable("VLLM_PLUGINS", "ascend", *CUDA), "variable.refused"),
    ("the other model runner", variable("VLLM_USE_V2_MODEL_RUNNER", "1", *CUDA), "variable.refused"),
    ("Kubernetes' VLLM_PORT", variable("VLLM_PORT", "tcp://10.0.0.1:8000"), "variable.refused"),
    ("a range of ports misspelt", variable("HCCL_HOST_SOCKET_PORT_RANGE", "any"), "variable.refused"),
    # The machine.
    ("Docker's shared memory", free("free_gib", 4000.0, 0.06), "machine.shared_memory"),
    ("a full disk", free("free_gib", 500.0), "machine.disk"),
    ("too little memory", free("free_memory_gib", 100.0), "machine.memory"),
    # Where the run starts.
    ("no Ray", variable("RAY_ADDRESS", None), "ray.head"),
    ("not the head", variable("RAY_ADDRESS", "198.51.100.7:6379"), "ray.head"),
    ("an address without port", variable("RAY_ADDRESS", "127.0.0.1"), "ray.head"),
    ("another Ray", ray_refuses, "ray.head"),
    ("a node missing", cluster([16]), "ray.devices"),
    ("another run on the cluster", cluster([16, 16], free=16), "ray.devices"),
    ("a node without patches", cluster([16, 16], said={"10.0.0.1": [], "10.0.0.2": [NOT_PATCHED]}), "ascend.patches"),
    ("the same run twice", a_run_goes_on, "run_dir.in_use"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "code"), [row[1:] for row in MISTAKES], ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_found(node, spoil, code):
    found = problems_of(node.config(*(spoil(node) or ())))
    assert code in map(code_of, found) and len(found) <= 3, found


def test_a_good_node_has_no_problem(node):
    assert problems_of(node.config()) == problems_of(node.config(*CUDA)) == []
    for mode in ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"):
        graphs = [*GRAPHS, f"{COMPILATION}.cudagraph_mode={mode}"]
        assert problems_of(node.config(*graphs)) == []
        (said,) = compatibility.warnings(config_of("dapo_qwen3_32b", *graphs, "speculation.method=ngram"))
        slow = "speculation.method=ngram (nearly every step runs eager: set cudagraph_mode=FULL)"
        assert (slow in said) == (mode == "FULL_DECODE_ONLY")


def test_a_line_has_the_value_what_is_wrong_what_to_do_and_on_which_nodes(node):
    disk, memory = "a [machine.disk]", "b [machine.memory]"
    join_cluster(node, [16, 16], said={"10.0.0.1": [disk, memory], "10.0.0.2": [disk]})
    assert problems_of(node.config()) == [f"on every node: {disk}", f"on 10.0.0.1: {memory}"]
    join_cluster(node, [16, 16])
    assert problems_of(node.config("data.train_batch_size=31"))[0] == (
        "data.train_batch_size=31, actor.ppo_mini_batch_size=32: the first must be a multiple of the second: change "
        "one [size.divides]"
    )
    free("free_gib", 4000.0, 0.06)(node)
    (line,) = problems_of(node.config())
    assert line.startswith("0.1 GiB are free in /dev/shm, 4.1 are needed (vLLM's queues between ranks 4.1): ")
    assert line.endswith(": start the container with --shm-size=5g or more [machine.shared_memory]")


SLOW, FAST, BROKEN = {"median_ms": 50.0}, {"median_ms": 5.0}, {"error": "RuntimeError: no kernel"}


@pytest.fixture
def said(capsys, monkeypatch, node):
    monkeypatch.setattr(report, "compose_config", lambda name, overrides: node.config(*overrides, name=name))

    def run(*arguments):
        code = report.main(["--config-name", "dapo_qwen3_32b", *arguments])
        return code, capsys.readouterr().out

    return run


def test_a_good_node_is_all_green(said, node):
    """And preflight looks at the cluster that a run would join, by the address that `ray start` wrote down."""
    node.monkeypatch.delenv("RAY_ADDRESS")
    node.set(machine, "cluster_of_this_node", lambda: "127.0.0.1:6379")
    code, printed = said()
    assert code == 0 and "red" not in printed and "skip" not in printed and "0 problems" in printed
    assert "2 nodes x 16 npu devices; rollout: 4 replicas of 8, up to 128 requests each; training: megatron" in printed
    for line in ("routing: ", "speculation: sam, up to 3 draft tokens, exact verification\n", "sharing: "):
        assert f"\n{line}" in printed
    assert "longest responses" in printed and "optimizer" in printed and "a checkpoint has 427 GiB" in printed


def test_slots_are_those_of_a_data_parallel_rank():
    printed = "\n".join(report.describe(config_of("dapo_qwen3_235b", "speculation=off")))
    assert "rollout: 1 replica of 128, up to 64 requests on each of 32 data-parallel ranks; training" in printed
    assert "\nspeculation: off, exact verification\n" in printed


def test_a_problem_is_red_below_its_subject_with_its_mend_and_a_laptop_skips_what_needs_the_device(said, node):
    node.set(report, "has_device", lambda device: False)
    node.monkeypatch.delenv("RAY_ADDRESS")
    node.monkeypatch.delenv("ASCEND_HOME_PATH")
    kept = {find: scopes for find, scopes in preflight.CHECKS.items() if find != vllm_command.what_verl_and_vllm_say}
    node.set(preflight, "CHECKS", kept)
    (node.folder / "data" / "aime_2024.parquet").unlink()
    (node.folder / "model" / "tokenizer.json").write_text('{"model": {')
    code, printed = said()
    assert code == 2 and "red   data\n        data.val_files=" in printed and printed.endswith("\n2 problems\n")
    assert "green batches" in printed and "red   tokenizer\n" in printed and "[model.tokenizer]" in printed
    assert len(skipped := preflight.select("device")) >= 4
    for name in skipped:
        assert f"skip  {name}: no device of this config in this machine" in printed


def test_the_self_test_times_both_verifications_and_recommends_the_faster_one_that_runs():
    assert all(row["median_ms"] > 0 for row in verifications("cpu", batch=1).values())
    for exact, rejection, wanted in (
        (SLOW, FAST, "is faster, but its tokens differ"),
        (FAST, SLOW, "keep speculation.verification=exact"),
        (SLOW, BROKEN, "keep speculation.verification=exact"),
        (BROKEN, FAST, "set speculation.verification=rejection"),
    ):
        assert wanted in recommend({"exact": exact, "rejection": rejection})
