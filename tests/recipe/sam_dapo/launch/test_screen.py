"""What the screen says of a run, and where it goes on; its directory agrees with it."""

import json
import shutil
import sys
import time

import pytest
import torch
from omegaconf import OmegaConf

from recipe.sam_dapo.launch import screen
from recipe.sam_dapo.launch.config import ConfigError
from recipe.sam_dapo.launch.screen import Ending, Progress, failed, last_line

TRACKER = "checkpoints/latest_checkpointed_iteration.txt"


def checkpoint(run_directory, step):
    (folder := run_directory / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
    for part in ("actor/model_world_size_1_rank_0.pt", "data.pt"):
        (folder / part).parent.mkdir(exist_ok=True)
        torch.save({}, folder / part)
    (run_directory / TRACKER).write_text(str(step))
    return folder


def config(run_directory, **trainer):
    kept = {"resume_mode": "auto", "resume_from_path": None, "default_local_dir": str(run_directory / "checkpoints")}
    return OmegaConf.create({"trainer": kept | trainer})


def test_a_run_goes_on_from_what_verls_tracker_names(tmp_path):
    assert screen.checkpoint(config(tmp_path)) is None
    before, newest = checkpoint(tmp_path, 3), checkpoint(tmp_path, 6)
    assert screen.checkpoint(config(tmp_path)) == newest
    assert screen.checkpoint(config(tmp_path, resume_mode="disable")) is None
    (tmp_path / TRACKER).write_text("3")  # a run was ended between a checkpoint and its row of metrics
    assert screen.checkpoint(config(tmp_path)) == before


def cut(newest):
    part = newest / "actor" / "model_world_size_1_rank_0.pt"
    part.write_bytes(part.read_bytes()[:-1])


DAMAGES = {
    "unfinished": lambda newest: (newest / "data.pt").unlink(),
    "cut": cut,
    "a rank missing": lambda newest: torch.save({}, newest / "actor" / "model_world_size_2_rank_0.pt"),
    "removed by verl": lambda newest: shutil.rmtree(newest / "actor"),
    "a tracker cut by a full disk": lambda newest: (newest.parent.parent / TRACKER).write_text(""),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_run_goes_on_from_the_newest_whole_checkpoint(tmp_path, damage):
    before, newest = checkpoint(tmp_path, 9), checkpoint(tmp_path, 10)
    damage(newest)
    assert screen.checkpoint(config(tmp_path)) == (newest if screen.is_whole(newest) else before)
    for folder in (before, newest):
        (folder / "data.pt").unlink(missing_ok=True)
    named = {"resume_mode": "resume_path", "resume_from_path": str(newest)}
    for one in (config(tmp_path), config(tmp_path, **named)):
        with pytest.raises(ConfigError, match="no whole checkpoint, .*: put it back, name another with "):
            screen.checkpoint(one)


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
LOST_NODE = f"""{DEAD_ACTOR}
The above exception was the direct cause of the following exception:

recipe.sam_dapo.trainer.NodeLostError: node 10.0.0.2 is lost: its Ray
"""
REFUSED = """ray.exceptions.RayTaskError(ConfigError): ray::TaskRunner.run()
recipe.sam_dapo.launch.config.ConfigError: dtype=x [config.vllm]
"""
UNLOADABLE = """ray.exceptions.ActorDiedError: The actor died because of an error raised in its creation task, ray::A()
RuntimeError: Error loading module from module_path='/my/reward.py'
"""
UNREADABLE = "  File worker.py, line 3, in load_checkpoint\n_pickle.UnpicklingError: invalid load key, '\\x00'.\n"
GONE = "RuntimeError: every response failed in round 1 of step 3: data_source 'x': a.py:1: EngineDeadError: gone"
DEAD_SERVER = {"a rollout server": "a rollout server (process 7)"}
DEAD_ENGINE = {"the vLLM engine": "the vLLM engine (process 8)"}


@pytest.mark.parametrize(
    ("dead", "text", "said"),
    [
        (DEAD_SERVER | DEAD_ENGINE, GONE, "the vLLM engine (process 8) was killed or crashed"),
        (DEAD_SERVER, EXCEPTION, "a rollout server (process 7) was killed or crashed"),
        ({}, DEAD_ACTOR, "a worker of the trainer was killed or crashed on 10.0.0.2"),
        ({}, LOST_NODE, "node 10.0.0.2 is lost: its Ray"),
        ({}, EXCEPTION, "ValueError: train_batch_size must be positive"),
        ({}, REFUSED, "dtype=x [config.vllm]"),
        ({}, UNLOADABLE, "RuntimeError: Error loading module from module_path='/my/reward.py'"),
        ({}, UNREADABLE, "/a/global_step_6 cannot be loaded (_pickle.UnpicklingError: invalid load key, '\\x00'.)"),
    ],
)
def test_the_reason_is_what_came_first(tmp_path, dead, text, said):
    assert failed(1, dead, text, tmp_path, "/a/global_step_6")[:2] == (1, said)


def test_last_line_says_how_to_go_on(tmp_path):
    """tests/end_to_end/test_endings.py has those of runs that go on, and that finish."""
    assert last_line(tmp_path, Ending(1, "it rained", "wait")) == (
        f"error: it rained, while starting; log: {tmp_path}/train.log; wait; then the same command starts from the "
        "beginning (no checkpoint to go on from)"
    )
    line = last_line(tmp_path, failed(1, {}, UNREADABLE, tmp_path, checkpoint(tmp_path, 1)))
    assert line.endswith("or begin again with trainer.resume_mode=disable"), "the same command would fail again"


ROW = {"rollout/reward_all/mean": 0.25, "response_length/mean": 84.6, "timing_s/step": 9.04, "actor/lr": 1.0}
WARNING = "(TaskRunner pid=7) WARNING 11-28 09:00:00 [sam.vllm.proposer] drafting failed\n"


def test_phases_steps_and_warnings_are_lines(tmp_path, capsys):
    (log := tmp_path / "train.log").write_text(WARNING)
    bar = Progress(tmp_path, total_steps=10, first=4)
    for phase in ("starting Ray", "starting the engines", "weight_sync", "validation", "running"):
        (tmp_path / "state.json").write_text(json.dumps({"phase": phase, "since": time.time()}))
        bar.update()
    (metrics := tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": n} | ROW) + "\n" for n in range(8)))
    bar.update()
    metrics.write_text("".join(json.dumps({"step": n} | ROW) + "\n" for n in (1, 8)))  # written anew by a resumed run
    log.write_text(WARNING * 3)
    bar.update()
    steps = [f"training: step {n} of 10: 9.0 s, reward +0.25, response 85 tokens" for n in (5, 6, 7, 8)]
    phases = ["starting Ray", "starting the engines", "validation"]
    said = "warning: sam.vllm.proposer: drafting failed"
    assert capsys.readouterr().err.splitlines() == [*phases, *steps, said]


AT = {
    "phase": "rollout",
    "since": 100.0,
    "at": 120.0,
    "done": 24,
    "all": 96,
    "tokens": 12340,
    "running": 32,
    "length": 2.314,
}


@pytest.mark.parametrize(
    ("state", "line"),
    [
        ({"phase": "starting the engines", "since": 95.0}, "starting the engines, 00:25"),
        ({"phase": "rollout", "since": 100.0}, "step 3, 00:20"),
        (AT | {"done": 0}, "step 3: 0/96 done, 00:20, 12.3k tokens, 617/s, 32 running, length 2.31"),
        (AT, "step 3: 24/96 done, 01:00 left, 12.3k tokens, 617/s, 32 running, length 2.31"),
        (
            AT | {"phase": "validation"},
            "validation: 24/96 done, 01:00 left, 12.3k tokens, 617/s, 32 running, length 2.31",
        ),
        ({"phase": "weight_sync", "since": 119.0}, "step 3: weight sync, 00:01"),
    ],
)
def test_what_goes_on_is_a_line_with_the_time(state, line):
    assert screen.progress_of(state, 3, now=120.0) == line


def test_on_a_terminal_one_line_moves_and_a_file_gets_it_now_and_then(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 120.0)
    (tmp_path / "state.json").write_text(json.dumps(AT))
    bar = Progress(tmp_path, total_steps=10)
    bar.update()
    assert capsys.readouterr().err == ""
    bar.next_line = 0.0
    for _ in range(2):
        bar.update()
    assert capsys.readouterr().err.count("step 1: 24/96 done") == 1
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "30")
    bar.update()
    bar._say("warning: x")
    bar.update()
    moving = "step 1: 24/96 done, 01:00 lef"
    assert capsys.readouterr().err.replace(screen.CLEAR, "<") == f"<{moving}<warning: x\n<{moving}"
