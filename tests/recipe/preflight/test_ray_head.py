"""Where a run may start: on its cluster's head."""

import socket

import pytest

from recipe.launch.config import compose_config
from recipe.preflight import cluster, machine


@pytest.fixture
def head(tmp_path, monkeypatch):
    """Something that listens where Ray's head would, and Ray's note of it."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    note = tmp_path / "ray" / "ray_current_cluster"
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        note.write_text(address)
        yield address
    note.unlink()


def found(name="dapo_qwen3_32b", *overrides):
    return list(cluster.start_problems(compose_config(name, list(overrides))))


def test_the_head_may_start_a_run(head, monkeypatch):
    for address in (head, "auto", f"ray://{head}"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert found() == []


def test_a_run_of_one_node_needs_no_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert found("dapo_qwen3_32b", "trainer.nnodes=1") == found("dapo_tiny_cpu") == []


def test_a_cluster_that_the_run_was_not_told_of(head):
    (problem,) = found()
    assert problem.code == "ray.address_unset" and problem.remedy.endswith(f"RAY_ADDRESS={head}")
    assert cluster.cluster_of_this_node() == head


def test_a_note_of_a_ray_that_was_killed_counts_for_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    (tmp_path / "ray" / "ray_current_cluster").write_text(address)
    assert cluster.cluster_of_this_node() is None
    assert found()[0].code == "ray.no_head"
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert found()[0].code == "ray.no_answer"


def test_this_node_and_others():
    for host, is_ours in (("127.0.0.1", True), ("localhost", True), ("::1", True), ("198.51.100.7", False)):
        assert machine.is_free(0, host) is is_ours
    assert not machine.is_free(0, "no-such-host.invalid")
