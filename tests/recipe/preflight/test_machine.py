"""What a machine must have: the numbers behind preflight's lines."""

import socket

import pytest

from recipe.launch.config import compose_config
from recipe.preflight import machine


def ports(monkeypatch, **variables):
    for name in ("VLLM_PORT", "PORT", "HCCL_HOST_SOCKET_PORT_RANGE", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    return list(machine._ports(compose_config("dapo_qwen3_32b", [])))


@pytest.fixture
def taken():
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


def test_a_taken_port_is_not_free(taken):
    assert not machine.is_free(taken)
    assert not machine.is_free(70000)


def test_a_head_that_is_still_to_start_needs_rays_port(monkeypatch, taken):
    monkeypatch.setattr(machine, "RAY_CLIENT_PORT", 0)  # whatever runs on this machine
    (problem,) = ports(monkeypatch, PORT=taken)
    assert (problem.code, problem.value) == ("machine.port", f"port {taken}")
    assert ports(monkeypatch, PORT=taken, RAY_ADDRESS="127.0.0.1:1") == []  # Ray itself has it


@pytest.mark.parametrize(("wanted", "said"), [("auto", []), ("60000-x", ["machine.hccl_ports"])])
def test_hccls_ranges_as_written(monkeypatch, wanted, said):
    found = ports(monkeypatch, HCCL_HOST_SOCKET_PORT_RANGE=wanted, RAY_ADDRESS="x")
    assert [one.code for one in found] == said


def test_hccls_ranges_must_be_free(monkeypatch, taken):
    (problem,) = ports(monkeypatch, HCCL_HOST_SOCKET_PORT_RANGE=f"{taken - 1}-{taken},{taken}", RAY_ADDRESS="x")
    assert problem.code == "machine.hccl_ports" and problem.value.endswith((f"first {taken}", f"first {taken - 1}"))


def test_shared_memory_of_a_node_with_two_engines_of_eight_ranks(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "x")
    parts = machine.shared_memory_parts(compose_config("dapo_qwen3_32b", []))
    assert parts["vLLM's queues between ranks"] == pytest.approx(2 * (160 + 8 * 240 + 24) / 1024)
    assert parts["Ray's objects"] == parts["verl's weight sync"] == 0
    monkeypatch.delenv("RAY_ADDRESS")
    parts = machine.shared_memory_parts(compose_config("dapo_qwen3_32b", []))
    assert parts["Ray's objects"] == pytest.approx(9.3, abs=0.05)


def test_shared_memory_on_a_cpu_is_the_weight_syncs_bucket():
    for devices in (1, 2):
        parts = machine.shared_memory_parts(compose_config("dapo_tiny_cpu", [f"trainer.n_gpus_per_node={devices}"]))
        assert sum(parts.values()) == parts["verl's weight sync"] == devices * 32 / 1024


@pytest.mark.parametrize(
    ("overrides", "count"),
    [
        ([], 2),
        (["trainer.max_actor_ckpt_to_keep=1"], 2),  # the old one goes after the new one is written
        (["trainer.max_actor_ckpt_to_keep=5"], 5),
        (["trainer.max_actor_ckpt_to_keep=null"], 10),
        (["trainer.save_freq=-1"], 0),
        (["trainer.total_training_steps=10"], 1),
        (["trainer.total_training_steps=5"], 1),
    ],
)
def test_how_many_checkpoints_there_are_at_once(overrides, count):
    assert machine.checkpoints_at_once(compose_config("dapo_qwen3_32b", overrides)) == count


@pytest.mark.parametrize(
    ("wanted", "is_wrong"),
    [("lo", False), ("=lo", False), ("^docker", False), ("", False), ("eth77", True), ("eth77,lo", False)],
)
def test_network_cards(monkeypatch, wanted, is_wrong):
    monkeypatch.setattr(machine.psutil, "net_if_addrs", lambda: {"lo": [], "enp1s0": []})
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HCCL_SOCKET_IFNAME", wanted)
    assert bool(list(machine._interfaces(None))) is is_wrong


def test_an_old_driver_and_a_tensor_larger_than_the_bucket(monkeypatch):
    monkeypatch.setattr("verl.utils.device.is_support_ipc", lambda: False)
    monkeypatch.setattr(machine, "free_gib", lambda place: 100.0)
    monkeypatch.setattr(machine.device_memory, "largest_tensor_mib", lambda config: 2968.0)
    (problem,) = machine.weight_sync_problems(compose_config("dapo_qwen3_32b", []))
    assert problem.code == "weight_sync.bucket" and "=2048, 2968" in problem.value


def test_a_driver_that_cannot_be_asked(monkeypatch):
    def refuse():
        raise RuntimeError("Failed to execute npu-smi command")

    monkeypatch.setattr("verl.utils.device.is_support_ipc", refuse)
    (problem,) = machine.weight_sync_problems(compose_config("dapo_qwen3_32b", []))
    assert (problem.code, problem.value) == ("weight_sync.driver", "Failed to execute npu-smi command")


def test_what_a_nodes_memory_holds_at_most():
    parts = machine.memory_parts(compose_config("dapo_qwen3_32b", ["speculation.scope=history"]))
    # Two engines of eight dies on a node; the automata of a round of 96 prompts are beyond their budget of 2 GiB each.
    assert parts["drafters' automata, history within"] == 2 * 2.0
    assert parts["sharing's log"] == pytest.approx(96 * 16 * 34816 * 22.5 / 2**30, rel=0.01)
    tiny = machine.memory_parts(compose_config("dapo_tiny_cpu", ["trainer.n_gpus_per_node=2"]))
    assert 0.0 < tiny["sharing's log"] < tiny["drafters' automata, history within"] < 0.02
    for override in ("speculation=off", "speculation.sharing=none"):
        parts = machine.memory_parts(compose_config("dapo_qwen3_32b", [override]))
        assert parts["sharing's log"] == 0.0


def test_the_bytes_of_an_automatons_token_are_the_stores():
    from sam.automaton import store

    assert machine.AUTOMATON_BYTES == pytest.approx(store.BLOCK_BYTES / store.BLOCK_TOKENS, abs=1)
