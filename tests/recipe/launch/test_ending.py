"""The last line of a run says why it ended, and the rest of its directory agrees with it."""

import os
import time

import pytest
import torch

from sam_recipe.launch import checkpoints
from sam_recipe.launch.ending import ERROR_FILE, Ending, failed, last_line, who_died, write_error
from sam_recipe.record import read_json
from tests.recipe.launch.test_checkpoints import checkpoint

DEAD_ACTOR = """ray::TaskRunner.run() (pid=1, ip=10.0.0.1)
ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.
\tclass_name: create_colocated_worker_cls.<locals>.WorkerDict
\tpid: 4711
\tip: 10.0.0.2
"""
EXCEPTION = """ray::TaskRunner.run() (pid=1, ip=10.0.0.1)
  File "trainer.py", line 1
ValueError: train_batch_size must be positive
"""
REWARD = """ray::TaskRunner.run() (pid=1, ip=10.0.0.1)
  File "dynamic_sampling.py", line 1
RuntimeError: every response failed in round 1 of step 1: data_source 'own': /my/reward.py:12: ValueError: boom
"""
UNLOADABLE = """ray::TaskRunner.run() (pid=1, ip=10.0.0.1)
ray.exceptions.ActorDiedError: The actor died because of an error raised in its creation task, ray::RewardLoopWorker()
  File "/my/reward.py", line 1, in <module>
    import nothing_such
ModuleNotFoundError: No module named 'nothing_such'

The above exception was the direct cause of the following exception:

ray::RewardLoopWorker.__init__() (pid=2, ip=10.0.0.1)
RuntimeError: Error loading module from module_path='/my/reward.py'
"""


@pytest.mark.parametrize(
    ("code", "died", "error", "said"),
    [
        (1, "a rollout server (process 7)", DEAD_ACTOR, "a rollout server (process 7) was killed or crashed"),
        (1, None, DEAD_ACTOR, "a worker of the trainer was killed or crashed on 10.0.0.2"),
        (1, None, EXCEPTION, "ValueError: train_batch_size must be positive"),
        (1, None, REWARD, REWARD.splitlines()[-1]),
        (1, None, UNLOADABLE, f"ModuleNotFoundError: No module named 'nothing_such' ({UNLOADABLE.splitlines()[-1]})"),
        (1, "a rollout server (process 7)", EXCEPTION, "a rollout server (process 7) was killed or crashed"),
        (137, None, None, "the run's own process was killed (signal 9)"),
        (3, None, None, "the run ended with exit code 3"),
    ],
)
def test_reason(tmp_path, code, died, error, said):
    ending = failed(code, died, error and {"type": "RayTaskError", "text": error}, tmp_path)
    assert (ending.code, ending.reason) == (code, said)


ENGINE, WORKER = "the vLLM engine", "a worker of the trainer"
GONE = "RuntimeError: every response failed in round 1 of step 3: data_source 'x': a.py:1: EngineDeadError: gone"


@pytest.mark.parametrize(
    ("text", "after", "first"),
    [
        ("ValueError: wrong", -0.2, None),  # processes end because of an exception
        ("ValueError: wrong", 5.0, f"{WORKER} (process 6)"),  # one may come from a process that died
        (GONE, -0.2, f"{ENGINE} (process 7)"),  # a killed engine fails its requests sooner than a look notices
    ],
)
def test_what_came_first_is_the_cause(text, after, first):
    dead = {WORKER: f"{WORKER} (process 6)", ENGINE: f"{ENGINE} (process 7)"}
    assert who_died(dead, 1000.0, {"type": "RayTaskError", "text": text, "at": 1000.0 + after}) == first


@pytest.mark.parametrize("large", [False, True])
def test_full_disk(tmp_path, large):
    """The kernel answers every write to /dev/full as a full disk does; torch then says it in its own words."""

    def save_checkpoint():
        torch.save(torch.zeros(10**6 if large else 1), "/dev/full")

    with pytest.raises(RuntimeError) as raised:
        save_checkpoint()
    write_error(tmp_path, raised.value)
    ending = failed(1, None, read_json(tmp_path / ERROR_FILE), tmp_path)
    assert ending.reason.startswith(f"no space left on the disk of {tmp_path / 'checkpoints'} (")
    assert ending.reason.endswith(" GiB free) for the checkpoint of step 1")


def test_last_line_says_how_to_go_on(tmp_path):
    ending = Ending(1, "it rained", "wait")
    assert last_line(tmp_path, ending) == (
        f"error: it rained, while starting; log: {tmp_path}/train.log; wait; then the same command starts from the "
        "beginning (no checkpoint to go on from)"
    )
    (tmp_path / "state.json").write_text('{"phase": "running"}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    checkpoint(tmp_path, 1)
    line = last_line(tmp_path, Ending(1, "it rained"))
    assert ", in step 3; " in line and line.endswith("; the same command goes on after step 1")
    (tmp_path / "config.yaml").write_text("trainer: {resume_mode: disable}")
    assert "starts from the beginning" in last_line(tmp_path, Ending(1, "it rained"))
    said = f"finished after 2 steps; log: {tmp_path}/train.log; look at it: sam report {tmp_path}"
    assert last_line(tmp_path, Ending(0, None)) == said
    (tmp_path / "wandb" / "offline-run-20260101_000000-abc").mkdir(parents=True)
    assert last_line(tmp_path, Ending(0, None)) == f"{said}; upload it: wandb sync {tmp_path}/wandb/offline-run-*"


def test_only_this_run_s_unfinished_checkpoints_are_removed(tmp_path):
    copied, unfinished, kept = (checkpoint(tmp_path, step) for step in (9, 2, 1))
    since = time.time() - 60
    os.utime(copied, (since - 1, since - 1))
    checkpoints.remove_unfinished(tmp_path, since)
    assert kept.exists() and copied.exists() and not unfinished.exists()
