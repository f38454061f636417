"""What a machine must have: the numbers behind preflight's lines."""

import socket

import pytest

from recipe.launch.config import compose_config
from recipe.preflight import machine


@pytest.fixture
def said(monkeypatch):
    """Codes and values of what preflight says of a machine that is good otherwise, with these variables."""

    def find(*overrides, **variables):
        for name in ("VLLM_PORT", "PORT", "RAY_ADDRESS", machine.HCCL_PORTS, *machine.NETWORK_CARDS):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(machine, "RAY_CLIENT_PORT", 0)  # whatever runs on this machine
        config = compose_config("dapo_qwen3_32b", list(overrides))
        return [(one.code, one.value) for one in machine.find_problems(config)]

    monkeypatch.setattr(machine, "free_gib", lambda place: 4000.0)
    monkeypatch.setattr(machine, "free_memory_gib", lambda: 1500.0)
    monkeypatch.setattr(machine.psutil, "net_if_addrs", lambda: {"lo": [], "enp1s0": []})
    return find


def test_fixed_ports_must_be_free(said):
    with socket.create_server(("", 0)) as server:
        taken = server.getsockname()[1]
        assert said(PORT=taken) == [("machine.port", f"port {taken}")]  # of a Ray head that is still to start
        assert said(PORT=taken, RAY_ADDRESS="127.0.0.1:1") == []  # Ray itself has it
        for wanted, is_right in (("auto", True), ("60000-x", False), (f"{taken - 1}-{taken},{taken}", False)):
            found = said(HCCL_HOST_SOCKET_PORT_RANGE=wanted, RAY_ADDRESS="x")
            assert found == [("machine.hccl_ports", f"{machine.HCCL_PORTS}={wanted}")] * (not is_right)


@pytest.mark.parametrize(
    ("wanted", "is_wrong"),
    [("lo", False), ("=lo", False), ("^docker", False), ("", False), ("eth77", True), ("eth77,lo", False)],
)
def test_network_cards(said, wanted, is_wrong):
    found = said(RAY_ADDRESS="x", HCCL_SOCKET_IFNAME=wanted)
    assert found == [("machine.network_card", f"HCCL_SOCKET_IFNAME={wanted}")] * is_wrong


def test_shared_memory_by_what_it_is_for(monkeypatch):
    cluster = compose_config("dapo_qwen3_32b", [])
    monkeypatch.setenv("RAY_ADDRESS", "x")
    parts = machine.shared_memory_parts(cluster)  # two engines of eight ranks
    assert parts["vLLM's queues between ranks"] == pytest.approx(2 * (160 + 8 * 240 + 24) / 1024)
    assert parts["Ray's objects"] == parts["verl's weight sync"] == 0
    monkeypatch.delenv("RAY_ADDRESS")
    assert machine.shared_memory_parts(cluster)["Ray's objects"] == pytest.approx(9.3, abs=0.05)
    parts = machine.shared_memory_parts(compose_config("dapo_tiny_cpu", ["trainer.n_gpus_per_node=2"]))
    assert sum(parts.values()) == parts["verl's weight sync"] == 2 * 32 / 1024


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        ([], 2),
        (["trainer.max_actor_ckpt_to_keep=1"], 2),  # the old one goes after the new one is written
        (["trainer.max_actor_ckpt_to_keep=5"], 5),
        (["trainer.max_actor_ckpt_to_keep=null"], 10),
        (["trainer.save_freq=-1"], 0),
        (["trainer.total_training_steps=5"], 1),
    ],
)
def test_how_many_checkpoints_there_are_at_once(overrides, count):
    assert machine.checkpoints_at_once(compose_config("dapo_qwen3_32b", overrides)) == count


def test_what_a_nodes_memory_holds_at_most(said, monkeypatch):
    parts = machine.memory_parts(compose_config("dapo_qwen3_32b", []))
    # Two engines of eight dies on a node; the automata of a round of 96 prompts are beyond their budget of 2 GiB each.
    assert parts["drafters' automata"] == 2 * 2.0
    tiny = machine.memory_parts(compose_config("dapo_tiny_cpu", ["trainer.n_gpus_per_node=2"]))
    assert 0.0 < tiny["sharing's log"] < tiny["drafters' automata"] < 0.02
    off = machine.memory_parts(compose_config("dapo_qwen3_32b", ["speculation=off"]))
    assert sum(off.values()) == 0.0
    monkeypatch.setattr(machine, "free_memory_gib", lambda: 3.0)
    ((code, value),) = said(RAY_ADDRESS="x")
    assert code == "machine.memory" and "drafters' automata 4.0" in value and "\n" not in value


def test_the_bytes_of_an_automatons_token_are_the_stores():
    from sam.automaton import store

    assert machine.AUTOMATON_BYTES == pytest.approx(store.BLOCK_BYTES / store.BLOCK_TOKENS, abs=1)


def test_weights_are_handed_over_on_the_device_or_in_shared_memory(monkeypatch):
    config = compose_config("dapo_qwen3_32b", [])
    monkeypatch.setattr("verl.utils.device.is_support_ipc", lambda: False)
    monkeypatch.setattr(machine, "free_gib", lambda place: 100.0)
    monkeypatch.setattr(machine.device_memory, "largest_tensor_mib", lambda config: 2968.0)
    (problem,) = machine.weight_sync_problems(config)
    assert problem.code == "weight_sync.bucket" and "=2048, 2968" in problem.value

    def refuse():
        raise RuntimeError("Failed to execute npu-smi command")

    monkeypatch.setattr("verl.utils.device.is_support_ipc", refuse)
    (problem,) = machine.weight_sync_problems(config)
    assert (problem.code, problem.value) == ("weight_sync.driver", "Failed to execute npu-smi command")
