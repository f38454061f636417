"""What preflight asks of every node, on a real Ray of one node."""

import shutil
import tempfile

import pytest
import ray

from recipe.launch import versions
from recipe.launch.config import compose_config
from recipe.preflight import checks, cluster
from recipe.preflight.problem import Problem


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
def test_a_node_says_what_it_lacks(head):
    """The functions that run on the node, in a Ray worker of their own."""
    config = compose_config("dapo_qwen3_32b", [])
    ((address, problems),) = cluster.ask_nodes(config, ray.nodes(), checks.node_problems).items()
    assert address == ray.util.get_node_ip_address()
    codes = [problem.code for problem in problems]
    assert "data.missing" in codes and ("package.version" in codes or versions.installed("vllm-ascend"))


@pytest.mark.e2e
def test_free_dies_are_counted(head):
    @ray.remote(resources={"NPU": 4}, num_cpus=0)
    class Other:
        def ready(self):
            return True

    other = Other.remote()
    ray.get(other.ready.remote())
    config = compose_config("dapo_qwen3_32b", ["trainer.nnodes=1"])
    (problem,) = cluster._device_problems(config, ray.nodes(), ray.available_resources())
    assert problem.code == "ray.devices_taken" and problem.startswith("12 of 16 NPU are free")
    ray.kill(other)


def test_the_same_line_of_all_nodes_is_said_once():
    first, second = Problem("machine.disk", "a"), Problem("machine.memory", "b")
    found = {"10.0.0.1": [first, second], "10.0.0.2": [first]}
    said = [(problem.code, problem.value) for problem in cluster._by_problem(found)]
    assert said == [("machine.disk", "on every node: a"), ("machine.memory", "on 10.0.0.1: b")]


def test_a_node_on_which_nothing_can_run(monkeypatch):
    class Refuses:
        def options(self, **_):
            return self

        def remote(self, _):
            return self

    def get(*_, **__):
        raise ModuleNotFoundError("No module named 'recipe.preflight'")

    monkeypatch.setattr(ray, "remote", lambda **_: lambda function: Refuses())
    monkeypatch.setattr(ray, "get", get)
    node = {"NodeID": "0" * 56, "NodeManagerAddress": "10.0.0.2"}
    found = cluster.ask_nodes(compose_config("dapo_qwen3_32b", []), [node], checks.node_problems)
    assert found == {"10.0.0.2": [Problem("ray.node", "No module named 'recipe.preflight'")]}


def test_no_cluster_is_asked_without_an_address(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert list(cluster.find_problems(compose_config("dapo_qwen3_32b", []), checks.node_problems)) == []
