"""Where a run may start, on its cluster's head, and what preflight asks of every node, on a real Ray of one node."""

import shutil
import socket
import tempfile

import pytest
import ray

from recipe.launch import versions
from recipe.launch.config import compose_config
from recipe.preflight import checks, cluster, machine
from recipe.preflight.problem import Problem


def start(*overrides, name="dapo_qwen3_32b"):
    return [(one.code, one.remedy) for one in cluster.start_problems(compose_config(name, list(overrides)))]


@pytest.fixture
def note(tmp_path, monkeypatch):
    """Where Ray notes the address of the cluster that this node joined."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    return tmp_path / "ray" / "ray_current_cluster"


def test_a_run_starts_on_the_head_of_a_cluster_that_it_was_told_of(note, monkeypatch):
    assert start("trainer.nnodes=1") == start(name="dapo_tiny_cpu") == []  # a Ray of its own
    with socket.create_server(("127.0.0.1", 0)) as server:  # where Ray's head would listen
        address = f"127.0.0.1:{server.getsockname()[1]}"
        note.write_text(address)
        remedy = f"use the script in scripts/, or export RAY_ADDRESS={address}"
        assert start() == [("ray.address_unset", remedy)] and cluster.cluster_of_this_node() == address
        for told in (address, "auto", f"ray://{address}"):
            monkeypatch.setenv("RAY_ADDRESS", told)
            assert start() == []
    assert cluster.cluster_of_this_node() is None  # the note of a Ray that was killed
    assert start()[0][0] == "ray.no_answer"
    monkeypatch.delenv("RAY_ADDRESS")
    assert start()[0][0] == "ray.no_head"


def test_this_node_and_others():
    for host, is_ours in (("127.0.0.1", True), ("localhost", True), ("::1", True), ("198.51.100.7", False)):
        assert machine.is_free(0, host) is is_ours
    assert not machine.is_free(0, "no-such-host.invalid") and not machine.is_free(70000)


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
    config = compose_config("dapo_qwen3_32b", [])
    ((address, problems),) = cluster.ask_nodes(config, ray.nodes(), checks.node_problems).items()
    assert address == ray.util.get_node_ip_address()
    codes = [problem.code for problem in problems]
    assert "data.missing" in codes and ("package.version" in codes or versions.installed("vllm-ascend"))

    @ray.remote(resources={"NPU": 4}, num_cpus=0)
    class Other:
        def ready(self):
            return True

    other = Other.remote()
    ray.get(other.ready.remote())
    one_node = compose_config("dapo_qwen3_32b", ["trainer.nnodes=1"])
    (problem,) = cluster.device_problems(one_node, ray.nodes(), ray.available_resources())
    assert problem.code == "ray.devices_taken" and problem.startswith("12 of 16 NPU are free")
    ray.kill(other)


def test_the_same_line_of_all_nodes_is_said_once(monkeypatch):
    config = compose_config("dapo_qwen3_32b", [])
    first, second = Problem("machine.disk", "a"), Problem("machine.memory", "b")
    found = {"10.0.0.1": [first, second], "10.0.0.2": [first]}
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert list(cluster.find_problems(config, checks.node_problems)) == []  # no cluster is asked
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:6379")
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "Resources": {"NPU": 16}}] * 2)
    monkeypatch.setattr(ray, "available_resources", lambda: {"NPU": 32})
    monkeypatch.setattr(cluster, "ask_nodes", lambda *_: found)
    said = [(problem.code, problem.value) for problem in cluster.find_problems(config, checks.node_problems)]
    assert said == [("machine.disk", "on every node: a"), ("machine.memory", "on 10.0.0.1: b")]
