"""Ray's start. tests/end_to_end/test_endings.py has two runs at once, whose weights go through sockets of their own."""

import pytest
import ray

from recipe.sam_dapo import trainer


def test_ray_is_started_again_where_its_own_processes_were_slow(monkeypatch):
    asked, said = [], ["The node timed out during startup", "no"]

    def init(**arguments):
        asked.append(arguments)
        raise Exception(said[len(asked) - 1])

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(Exception, match="no"):
        trainer.start_ray(num_cpus=2)
    assert asked == [{"num_cpus": 2}] * 2
