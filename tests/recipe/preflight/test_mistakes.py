"""What a user may get wrong before 32 dies are taken: each mistake alone on a node that is good otherwise, and what
preflight says of it."""

import json
import re

import pytest
import ray

from sam_recipe import preflight
from sam_recipe.launch.versions import installed
from sam_recipe.patch import Patches
from sam_recipe.preflight import __main__ as report
from sam_recipe.preflight import compatibility, machine, vllm_command
from sam_recipe.preflight.npu_selftest import recommend, verifications
from tests.recipe.preflight.preflight_node import code_of, config_of, join_cluster, problems_of

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
COMPILATION = f"{VLLM}.compilation_config"
GRAPHS = (f"{ROLLOUT}.enforce_eager=false",)
ATTENTION = "actor_rollout_ref.model.override_config.attn_implementation"
CUDA = ("device=cuda", "training=fsdp2", "trainer.n_gpus_per_node=16", f"{ATTENTION}=flash_attention_2")
ULYSSES = f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size"
SUFFIX = "speculation.method=suffix"
SHARD, CANN = "model-00001-of-00002.safetensors", "cann/aarch64-linux/ascend_toolkit_install.info"
UNPATCHED = "vllm-ascend 0.23.0.post1 is not patched: run python -m sam_recipe.patch apply [ascend.patches]"


def ray_refuses(node):
    def refuse(**_):
        raise ConnectionError("version mismatch: the cluster has Ray 2.41.0")

    node.set(ray, "init", refuse)


# What is wrong, the code, and the overrides that it consists of.
OVERRIDES = [
    ("a hub's name for a folder", "model.missing", "actor_rollout_ref.model.path=Qwen/Qwen3-32B"),
    ("TP that divides nothing", "size.divides", f"{ROLLOUT}.tensor_model_parallel_size=6"),
    ("another size for vLLM", "config.refused", f"+{VLLM}.data_parallel_size=2"),
    ("CP that divides nothing", "size.divides", f"{ACTOR}.megatron.context_parallel_size=3"),
    ("experts that divide nothing", "size.divides", f"{ACTOR}.megatron.expert_model_parallel_size=3"),
    ("updates too small", "size.least", f"{ACTOR}.ppo_max_token_len_per_gpu=9216"),
    ("small steps", "size.least", f"{ROLLOUT}.max_num_batched_tokens=256"),
    ("no room for the cache", "memory.kv_cache", f"{ROLLOUT}.tensor_model_parallel_size=1"),
    ("no room to train", "memory.training", f"{ACTOR}.megatron.tensor_model_parallel_size=1"),
    ("a strategy misspelt", "config.refused", f"{ACTOR}.strategy=megatorn"),
    ("little of a die", "memory.kv_cache", f"{ROLLOUT}.gpu_memory_utilization=0.13"),
    ("no switch for a drafter", "config.refused", "speculation.method=hybrid", "speculation.draft_model=/x"),
    ("a pool", "config.refused", f"+{VLLM}.kv_transfer_config.kv_connector=AscendStoreConnector"),
    ("KV cache in memory of the host", "config.refused", f"+{VLLM}.kv_offloading_size=4"),
    ("graphs without compilation", "config.refused", *GRAPHS, f"+{COMPILATION}.mode=0"),
    ("sequences split without it", "config.refused", *CUDA, f"{ATTENTION}=sdpa", f"{ULYSSES}=2"),
]
# And what spoils the node.
SPOILT = [
    ("no tokenizer settings", "model.missing", lambda node: (node.folder / "model/tokenizer_config.json").unlink()),
    ("a shard missing", "model.missing", lambda node: (node.folder / "model" / SHARD).unlink()),
    ("another vLLM", "package.version", lambda node: node.installed("vllm", "0.24.0")),
    ("no Arctic Inference", "package.version", lambda node: node.installed("arctic-inference", None), SUFFIX),
    ("an old CANN", "package.version", lambda node: (node.folder / CANN).write_text("version=8.3.RC1\n")),
    ("no CANN", "package.version", lambda node: node.env("ASCEND_HOME_PATH", "/nowhere")),
    ("another torch-npu", "package.version", lambda node: node.installed("torch-npu", "0.1")),
    ("no Megatron-Bridge", "package.version", lambda node: node.lacks("megatron.bridge")),
    ("no flash-attn", "package.version", lambda node: node.lacks("flash_attn"), *CUDA),
    ("no patches", "ascend.patches", lambda node: node.set(Patches, "state", "published")),
    ("plugins left out", "variable.refused", lambda node: node.env("VLLM_PLUGINS", "ascend"), *CUDA),
    ("the other model runner", "variable.refused", lambda node: node.env("VLLM_USE_V2_MODEL_RUNNER", "1"), *CUDA),
    ("Kubernetes' VLLM_PORT", "variable.refused", lambda node: node.env("VLLM_PORT", "tcp://10.0.0.1:8000")),
    ("ports misspelt", "variable.refused", lambda node: node.env("HCCL_HOST_SOCKET_PORT_RANGE", "any")),
    ("Docker's shared memory", "machine.shared_memory", lambda node: node.free(shared=0.06)),
    ("a full disk", "machine.disk", lambda node: node.free(disk=500.0)),
    ("too little memory", "machine.memory", lambda node: node.set(machine, "free_memory_gib", lambda: 100.0)),
    ("no Ray", "ray.head", lambda node: node.env("RAY_ADDRESS", None)),
    ("not the head", "ray.head", lambda node: node.env("RAY_ADDRESS", "198.51.100.7:6379")),
    ("an address without port", "ray.head", lambda node: node.env("RAY_ADDRESS", "127.0.0.1")),
    ("another Ray", "ray.head", ray_refuses),
    ("a node missing", "ray.devices", lambda node: join_cluster(node, [16])),
    ("another run on the cluster", "ray.devices", lambda node: join_cluster(node, [16, 16], free=16)),
    ("an unpatched node", "ascend.patches", lambda node: join_cluster(node, [16, 16], said={"10.0.0.2": [UNPATCHED]})),
]
MISTAKES = [(name, code, lambda node: None, *overrides) for name, code, *overrides in OVERRIDES] + SPOILT


@pytest.mark.parametrize("row", MISTAKES, ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_found(node, row):
    _, code, spoil, *overrides = row
    spoil(node)
    found = problems_of(node.config(*overrides))
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
    node.free(shared=0.06)
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
    assert "red   tokenizer\n" in printed and "[model.tokenizer]" in printed
    _, green, rest = re.split("green |skip, without the config's device: ", " ".join(printed.split()))
    assert "batches" in green.split(", ") and "tokenizer" not in green
    assert len(skipped := preflight.select("device")) >= 4 and rest.startswith(", ".join(skipped))


def test_without_a_config_it_says_what_the_environment_has(capsys, monkeypatch):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    assert report.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 80 and "tested    vLLM: 0.23.0" in lines
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    assert report.main(["--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["device"] == "cpu" and found["vllm"] == installed("vllm") and found["commit"]
    assert found["checked"]["vLLM's model runner"] == ["1", "refused"]
    assert found["checked"]["torch, CPU"] == [installed("torch"), "tested"] and "CANN" not in found["checked"]


def test_the_self_test_times_both_verifications_and_recommends_the_faster_one_that_runs():
    assert all(row["median_ms"] > 0 for row in verifications("cpu", batch=1).values())
    for exact, rejection, wanted in (
        (SLOW, FAST, "is faster, but its tokens differ"),
        (FAST, SLOW, "keep speculation.verification=exact"),
        (SLOW, BROKEN, "keep speculation.verification=exact"),
        (BROKEN, FAST, "set speculation.verification=rejection"),
    ):
        assert wanted in recommend({"exact": exact, "rejection": rejection})
