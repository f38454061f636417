"""Where a run may start, and what its machines must have: the numbers behind preflight's lines."""

import json
import socket

import pytest
import ray

from sam.automaton import store
from sam_recipe import preflight
from sam_recipe.launch import versions
from sam_recipe.preflight import machine
from tests.recipe.preflight.preflight_node import SIZES as QWEN3_32B
from tests.recipe.preflight.preflight_node import composed, config_of

# As in the published config.json files.
QWEN3_8B = QWEN3_32B | {
    "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288,
}  # fmt: skip
QWEN3_235B = {
    "hidden_size": 4096, "num_hidden_layers": 94, "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936, "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_experts": 128,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    """A config with overrides, of a model with these sizes."""

    def compose(*overrides, name="dapo_qwen3_32b", model=QWEN3_32B):
        (tmp_path / "config.json").write_text(json.dumps(model))
        return config_of(name, f"actor_rollout_ref.model.path={tmp_path}", *overrides)

    return compose


@pytest.mark.parametrize(
    ("name", "model", "billions", "overrides"),
    [
        ("dapo_qwen3_32b", QWEN3_32B, 32.8, []),
        ("dapo_qwen3_32b", QWEN3_32B, 32.8, ["training=fsdp2"]),
        ("dapo_qwen3_32b_128die", QWEN3_32B, 32.8, []),
        ("dapo_qwen3_235b", QWEN3_235B, 235.1, []),
        ("dapo_qwen3_8b_cuda", QWEN3_8B, 8.2, []),
    ],
)
def test_the_published_set_ups_fit(config, name, model, billions, overrides):
    published = config(*overrides, name=name, model=model)
    sizes, found = machine.model_of(published), machine.device_memory(published)
    assert (sizes.embeddings + sizes.attention + sizes.feed_forward) / 1e9 == pytest.approx(billions, abs=0.1)
    assert list(machine.memory_of_a_device(published)) == [] and found.longest_responses >= 1
    assert found.weights < 0.9 * found.device and sum(found.training.values()) < found.device


@pytest.mark.parametrize(
    ("training", "checkpoint", "offloaded"),
    [
        # bf16 weights, float32 master weights and moments; half of the optimizer and 16 dies' sixteenths of the weights
        ([], 14, 12 / 2 + 2),
        (["training=fsdp2"], 12, (8 + 4) / 2),  # float32 weights and moments
    ],
)
def test_bytes_of_a_parameter(config, training, checkpoint, offloaded):
    """In a checkpoint and in a node's memory; no estimate without the model or on a CPU."""
    found = machine.device_memory(config(*training))
    assert found.checkpoint * 2**30 == pytest.approx(checkpoint * 32.8e9, rel=0.01)
    assert found.offloaded * 2**30 == pytest.approx(offloaded * 32.8e9, rel=0.01)
    for name in ("dapo_qwen3_32b", "dapo_tiny_cpu"):
        assert machine.device_memory(config_of(name, "actor_rollout_ref.model.path=/none")) is None


def test_network_cards(monkeypatch):
    monkeypatch.setattr(machine.psutil, "net_if_addrs", lambda: {"lo": [], "enp1s0": []})
    monkeypatch.setenv("RAY_ADDRESS", "x")
    for wanted, is_wrong in (("lo", 0), ("=lo", 0), ("^docker", 0), ("", 0), ("eth77", 1), ("eth77,lo", 0)):
        monkeypatch.setenv("HCCL_SOCKET_IFNAME", wanted)
        found = machine.memory_and_disk(composed("dapo_qwen3_32b"))
        assert len([one for one in found if "[variable.refused]" in one]) == is_wrong, wanted


def test_how_many_checkpoints_there_are_at_once():
    for override, count in {
        "trainer.nnodes=2": 2,
        "trainer.max_actor_ckpt_to_keep=1": 2,  # the old one goes after the new one is written
        "trainer.max_actor_ckpt_to_keep=5": 5,
        "trainer.max_actor_ckpt_to_keep=null": 10,
        "trainer.save_freq=-1": 0,
        "trainer.total_training_steps=5": 1,
    }.items():
        assert machine.checkpoints_at_once(config_of("dapo_qwen3_32b", override)) == count, override


def test_what_a_nodes_memory_holds_at_most(monkeypatch):
    cluster, two = composed("dapo_qwen3_32b"), "trainer.n_gpus_per_node=2"
    monkeypatch.setenv("RAY_ADDRESS", "x")
    shared = machine.shared_memory_parts(cluster)  # two engines of eight ranks
    assert shared["vLLM's queues between ranks"] == pytest.approx(2 * (160 + 8 * 240 + 24) / 1024)
    assert shared["Ray's objects"] == shared["verl's weight sync"] == 0
    # The automata of a round of 96 prompts are beyond their budget of 2 GiB an engine.
    assert machine.memory_parts(cluster)["drafters' automata"] == 2 * 2.0
    assert machine.AUTOMATON_BYTES == pytest.approx(store.BLOCK_BYTES / store.BLOCK_TOKENS, abs=1)
    tiny = machine.memory_parts(config_of("dapo_tiny_cpu", two, "speculation.sharing=replicas"))
    assert 0.0 < tiny["sharing's log"] < tiny["drafters' automata"] < 0.02
    assert sum(machine.memory_parts(config_of("dapo_qwen3_32b", "speculation=off")).values()) == 0.0
    monkeypatch.setattr(machine, "free_memory_gib", lambda: 3.0)
    monkeypatch.setattr(machine, "free_gib", lambda place: 4000.0)
    (line,) = machine.memory_and_disk(cluster)
    assert "[machine.memory]" in line and "drafters' automata 4.0" in line and "\n" not in line
    monkeypatch.delenv("RAY_ADDRESS")
    assert machine.shared_memory_parts(cluster)["Ray's objects"] == pytest.approx(9.3, abs=0.05)
    shared = machine.shared_memory_parts(config_of("dapo_tiny_cpu", two))
    assert sum(shared.values()) == shared["verl's weight sync"] == 2 * 32 / 1024


def start(*overrides, name="dapo_qwen3_32b"):
    return list(machine.start(config_of(name, *overrides)))


def test_a_run_starts_on_the_head_of_a_cluster_that_it_was_told_of(tmp_path, monkeypatch):
    note = tmp_path / "ray" / "ray_current_cluster"  # of the address of the cluster that this node joined
    note.parent.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert start("trainer.nnodes=1") == start(name="dapo_tiny_cpu") == []  # a Ray of its own
    with socket.create_server(("127.0.0.1", 0)) as server:  # where Ray's head would listen
        address = f"127.0.0.1:{server.getsockname()[1]}"
        note.write_text(address)
        assert f"use the script in scripts/, or export RAY_ADDRESS={address}" in start()[0]
        assert machine.cluster_of_this_node() == address
        for told in (address, "auto", f"ray://{address}"):
            monkeypatch.setenv("RAY_ADDRESS", told)
            assert start() == []
    assert machine.cluster_of_this_node() is None  # the note of a Ray that was killed
    assert "nothing answers there" in start()[0]
    monkeypatch.delenv("RAY_ADDRESS")
    assert "RAY_ADDRESS is not set, trainer.nnodes=2: " in start()[0]
    for host in ("localhost", "[::1]", "198.51.100.7", "no-such-host.invalid"):
        assert machine.is_here(host) is (host in ("localhost", "[::1]"))


@pytest.mark.e2e
def test_a_node_says_what_it_lacks_and_how_many_dies_are_free(cluster):
    config = composed("dapo_qwen3_32b")
    head = {"versions": versions.known() | {"vllm": "0.22.1"}, "file": "/proc/none"}
    ((address, problems),) = machine.ask_nodes(config, ray.nodes(), preflight.of_this_node, head).items()
    assert address == ray.util.get_node_ip_address()
    said = "\n".join(problems)
    vllm = versions.installed("vllm")
    assert f"vllm {vllm}, the head has 0.22.1: install the same on every node [node.differs]" in said
    assert "[run_dir.not_shared]" in said
    assert "[data.missing]" in said and ("[package.version]" in said or versions.installed("vllm-ascend"))

    @ray.remote(resources={"NPU": 4}, num_cpus=0)
    class Other:
        def ready(self):
            return True

    other = Other.remote()
    ray.get(other.ready.remote())
    one_node = config_of("dapo_qwen3_32b", "trainer.nnodes=1")
    (problem,) = machine.devices_of_cluster(one_node, ray.nodes(), ray.available_resources())
    assert "[ray.devices]" in problem and problem.startswith("12 of 16 NPU are free")
    ray.kill(other)
