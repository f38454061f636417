"""Ray's start. tests/end_to_end/test_endings.py has two runs at once, whose weights go through sockets of their own."""

from contextlib import nullcontext

import pytest
import ray

from sam_recipe import trainer

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
