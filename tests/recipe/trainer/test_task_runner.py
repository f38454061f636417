"""Ray is started again where its own processes were slow, and for no other reason."""

import pytest

from recipe.trainer import task_runner

SLOW = Exception("The current node timed out during startup. This could happen because some of the raylet failed")


@pytest.mark.parametrize(
    ("errors", "starts", "raised"),
    [([], 1, None), ([SLOW], 2, None), ([SLOW] * 9, task_runner.STARTS, "timed out"), ([ValueError("no")], 1, "no")],
)
def test_ray_is_started_again(monkeypatch, errors, starts, raised):
    asked, errors = [], list(errors)

    def init(**arguments):
        asked.append(arguments)
        if errors:
            raise errors.pop(0)

    monkeypatch.setattr(task_runner.ray, "init", init)
    if raised is None:
        task_runner.start_ray(num_cpus=2)
    else:
        with pytest.raises(Exception, match=raised):
            task_runner.start_ray(num_cpus=2)
    assert asked == [{"num_cpus": 2}] * starts
