"""Where a run may start, and what its machines must have: the numbers behind preflight's lines."""

import json
import shutil
import socket
import tempfile

import pytest
import ray

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
def model_folder(tmp_path):
    def write(config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        return f"actor_rollout_ref.model.path={tmp_path}"

    return write


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
def test_the_published_set_ups_fit(model_folder, name, model, billions, overrides):
    config = config_of(name, model_folder(model), *overrides)
    sizes = machine.model_of(config)
    assert (sizes.embeddings + sizes.attention + sizes.feed_forward) / 1e9 == pytest.approx(billions, abs=0.1)
    assert list(machine.memory_of_a_device(config)) == []
    found = machine.device_memory(config)
    assert found.weights < 0.9 * found.device and sum(found.training.values()) < found.device
    assert found.longest_responses >= 1


@pytest.mark.parametrize(
    ("training", "checkpoint", "offloaded"),
    [
        # bf16 weights, float32 master weights and moments; half of the optimizer and 16 dies' sixteenths of the weights
        ([], 14, 12 / 2 + 2),
        (["training=fsdp2"], 12, (8 + 4) / 2),  # float32 weights and moments
    ],
)
def test_bytes_of_a_parameter(model_folder, training, checkpoint, offloaded):
    """In a checkpoint and in a node's memory."""
    config = config_of("dapo_qwen3_32b", model_folder(QWEN3_32B), *training)
    found = machine.device_memory(config)
    assert found.checkpoint * 2**30 == pytest.approx(checkpoint * 32.8e9, rel=0.01)
    assert found.offloaded * 2**30 == pytest.approx(offloaded * 32.8e9, rel=0.01)


def test_no_estimate_without_the_model_or_on_a_cpu():
    config = config_of("dapo_qwen3_32b", "actor_rollout_ref.model.path=/none")
    assert machine.device_memory(config) is None
    assert machine.device_memory(config_of("dapo_tiny_cpu")) is None


def test_network_cards(monkeypatch):
    monkeypatch.setattr(machine.psutil, "net_if_addrs", lambda: {"lo": [], "enp1s0": []})
    monkeypatch.setenv("RAY_ADDRESS", "x")
    config = composed("dapo_qwen3_32b")
    for wanted, is_wrong in (("lo", 0), ("=lo", 0), ("^docker", 0), ("", 0), ("eth77", 1), ("eth77,lo", 0)):
        monkeypatch.setenv("HCCL_SOCKET_IFNAME", wanted)
        found = [one for one in machine.memory_and_disk(config) if "[variable.refused]" in one]
        assert len(found) == is_wrong, wanted


def test_shared_memory_by_what_it_is_for(monkeypatch):
    cluster = composed("dapo_qwen3_32b")
    monkeypatch.setenv("RAY_ADDRESS", "x")
    parts = machine.shared_memory_parts(cluster)  # two engines of eight ranks
    assert parts["vLLM's queues between ranks"] == pytest.approx(2 * (160 + 8 * 240 + 24) / 1024)
    assert parts["Ray's objects"] == parts["verl's weight sync"] == 0
    monkeypatch.delenv("RAY_ADDRESS")
    assert machine.shared_memory_parts(cluster)["Ray's objects"] == pytest.approx(9.3, abs=0.05)
    parts = machine.shared_memory_parts(config_of("dapo_tiny_cpu", "trainer.n_gpus_per_node=2"))
    assert sum(parts.values()) == parts["verl's weight sync"] == 2 * 32 / 1024


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
    from sam.automaton import store

    parts = machine.memory_parts(composed("dapo_qwen3_32b"))
    # Two engines of eight dies on a node; the automata of a round of 96 prompts are beyond their budget of 2 GiB each.
    assert parts["drafters' automata"] == 2 * 2.0
    shared = "speculation.sharing=replicas"
    tiny = machine.memory_parts(config_of("dapo_tiny_cpu", "trainer.n_gpus_per_node=2", shared))
    assert 0.0 < tiny["sharing's log"] < tiny["drafters' automata"] < 0.02
    assert sum(machine.memory_parts(config_of("dapo_qwen3_32b", "speculation=off")).values()) == 0.0
    monkeypatch.setattr(machine, "free_memory_gib", lambda: 3.0)
    monkeypatch.setattr(machine, "free_gib", lambda place: 4000.0)
    (line,) = machine.memory_and_disk(composed("dapo_qwen3_32b"))
    assert "[machine.memory]" in line and "drafters' automata 4.0" in line and "\n" not in line
    assert machine.AUTOMATON_BYTES == pytest.approx(store.BLOCK_BYTES / store.BLOCK_TOKENS, abs=1)


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


@pytest.fixture(scope="module")
def head():
    """A head with 16 dies that are none."""
    folder = tempfile.mkdtemp(prefix="ray-")  # short: Ray's sockets lie below
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # or Ray leaves a token in HOME
        context = ray.init(num_cpus=1, resources={"NPU": 16}, include_dashboard=False, _temp_dir=folder)
        yield context.address_info["gcs_address"]
        ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.e2e
def test_a_node_says_what_it_lacks_and_how_many_dies_are_free(head):
    config = composed("dapo_qwen3_32b")
    ((address, problems),) = machine.ask_nodes(config, ray.nodes(), preflight.of_this_node).items()
    assert address == ray.util.get_node_ip_address()
    said = "\n".join(problems)
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


def test_the_same_line_of_all_nodes_is_said_once(monkeypatch):
    config, first, second = composed("dapo_qwen3_32b"), "a [machine.disk]", "b [machine.memory]"
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert list(preflight.ray_cluster(config)) == []  # no cluster is asked
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"NPU": 16}}] * 2)
    monkeypatch.setattr(ray, "available_resources", lambda: {"NPU": 32})
    monkeypatch.setattr(machine, "ask_nodes", lambda *_: {"10.0.0.1": [first, second], "10.0.0.2": [first]})
    said = ["on every node: a [machine.disk]", "on 10.0.0.1: b [machine.memory]"]
    assert list(preflight.ray_cluster(config)) == said
