"""Ray is started once more where its own processes were slow, and for no other reason."""

import pytest

from recipe.launch.config import compose_config
from recipe.trainer import task_runner

SLOW = Exception("The current node timed out during startup. This could happen because some of the raylet failed")


@pytest.mark.parametrize(
    ("errors", "starts", "raised"),
    [([], 1, None), ([SLOW], 2, None), ([SLOW, SLOW], 2, SLOW), ([ValueError("no such argument")], 1, ValueError)],
)
def test_ray_is_started_once_more(monkeypatch, tmp_path, errors, starts, raised):
    asked = []

    def init(**arguments):
        asked.append(arguments)
        if errors:
            raise errors.pop(0)

    monkeypatch.setattr(task_runner.ray, "init", init)
    monkeypatch.setenv("RAY_ADDRESS", "a cluster's")
    arguments = compose_config("dapo_tiny_cpu", []), {"env_vars": {}}, str(tmp_path), []
    if raised is None:
        task_runner.start_ray(*arguments)
    else:
        with pytest.raises(raised if isinstance(raised, type) else Exception, match="no such|timed out"):
            task_runner.start_ray(*arguments)
    assert len(asked) == starts and all(one == asked[0] for one in asked)
