"""The port on which training workers meet: none that the kernel gives to others; where there is none, verl's own."""

import inspect
import socket

import pytest
from verl.trainer.ppo.v1 import trainer_base

from recipe.trainer import worker_group
from recipe.trainer.workers import FIRST, KERNELS_RANGE, ROOM, WorkerGroup, master_port_range


def kernel_gives(monkeypatch, tmp_path, text):
    path = tmp_path / "ip_local_port_range"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(worker_group, "KERNELS_RANGE", path)


@pytest.mark.parametrize(("text", "end"), [("32768\t60999\n", 32768), ("25000 60999", 25000), (None, 32768)])
def test_it_is_below_what_the_kernel_gives_out(monkeypatch, tmp_path, text, end):
    kernel_gives(monkeypatch, tmp_path, text)
    ranges = [master_port_range() for _ in range(200)]
    assert all(FIRST <= first < first + ROOM == last <= end for first, last in ranges)
    assert len({first for first, _ in ranges}) > 100, "two runs on a node seldom try the same"


def test_where_the_kernel_gives_out_all_ports_verls_own_way_is_left(monkeypatch, tmp_path):
    kernel_gives(monkeypatch, tmp_path, "1024 65535")
    assert master_port_range() is None


@pytest.mark.skipif(not KERNELS_RANGE.exists(), reason="Linux only")
def test_no_socket_that_asks_for_any_port_is_given_one_of_them():
    lowest = int(KERNELS_RANGE.read_text().split()[0])
    for _ in range(200):
        with socket.socket() as other:
            other.bind(("", 0))
            assert other.getsockname()[1] >= lowest


def test_verls_trainers_make_their_groups_of_it(monkeypatch):
    monkeypatch.setattr(trainer_base, "RayWorkerGroup", worker_group.RayWorkerGroup)
    for _ in range(2):
        worker_group.install()
    assert trainer_base.RayWorkerGroup is WorkerGroup and issubclass(WorkerGroup, worker_group.RayWorkerGroup)
    assert "RayWorkerGroup(\n" in inspect.getsource(trainer_base), "verl still makes them by this name"
