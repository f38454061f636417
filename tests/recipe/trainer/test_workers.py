"""The port where two runs' workers meet, and Ray's start. tests/end_to_end/test_endings.py has two runs at once, whose
weights go through sockets of their own."""

from contextlib import nullcontext

import pytest
import ray

from sam_recipe import trainer
from sam_recipe.trainer import workers
from sam_recipe.trainer.workers import FIRST, ROOM, master_port_range


@pytest.mark.parametrize(
    ("text", "end"), [("32768\t60999\n", 32768), ("25000 60999", 25000), (None, 32768), ("1024 65535", None)]
)
def test_workers_meet_below_what_the_kernel_gives_out(monkeypatch, tmp_path, text, end):
    path = tmp_path / "ip_local_port_range"
    if text is not None:
        path.write_text(text)
    monkeypatch.setattr(workers, "KERNELS_RANGE", path)
    ranges = [master_port_range() for _ in range(200)]
    if end is None:  # it gives out all: verl's own way is left
        assert ranges == [None] * 200
    else:
        assert all(FIRST <= first < first + ROOM == last <= end for first, last in ranges)
        assert len({first for first, _ in ranges}) > 100, "two runs on a node seldom try the same"


SLOW = Exception("The current node timed out during startup. This could happen because some of the raylet failed")


@pytest.mark.parametrize(
    ("errors", "starts", "raised"),
    [([], 1, None), ([SLOW], 2, None), ([SLOW] * 9, trainer.STARTS, "timed out"), ([ValueError("no")], 1, "no")],
)
def test_ray_is_started_again_where_its_own_processes_were_slow(monkeypatch, errors, starts, raised):
    asked, errors = [], list(errors)

    def init(**arguments):
        asked.append(arguments)
        if errors:
            raise errors.pop(0)

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(Exception, match=raised) if raised else nullcontext():
        trainer.start_ray(num_cpus=2)
    assert asked == [{"num_cpus": 2}] * starts
