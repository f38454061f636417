"""What the screen says of a run, and where it goes on; its directory agrees with it."""

import json
import traceback

import pytest
import torch
from omegaconf import OmegaConf

from sam_recipe.launch import screen
from sam_recipe.launch.config import ConfigError
from sam_recipe.launch.screen import Ending, Progress, failed, last_line, resumes_after

TRACKER = "checkpoints/latest_checkpointed_iteration.txt"


def checkpoint(run_directory, step):
    (folder := run_directory / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
    (folder / "data.pt").write_bytes(b"0")
    (run_directory / TRACKER).write_text(str(step))
    return folder


def config(run_directory, **trainer):
    kept = {"resume_mode": "auto", "resume_from_path": None, "default_local_dir": str(run_directory / "checkpoints")}
    return OmegaConf.create({"trainer": kept | trainer})


def test_a_run_goes_on_from_what_verls_tracker_names_and_not_from_half_a_checkpoint(tmp_path):
    assert screen.checkpoint(config(tmp_path)) is None
    before, newest = checkpoint(tmp_path, 3), checkpoint(tmp_path, 6)
    OmegaConf.save(config(tmp_path), tmp_path / "config.yaml")
    assert screen.checkpoint(config(tmp_path)) == newest and resumes_after(tmp_path) == 6
    assert screen.checkpoint(config(tmp_path, resume_mode="disable")) is None
    named = config(tmp_path, resume_mode="resume_path", resume_from_path=str(newest))
    (newest / "data.pt").unlink()
    for one in (config(tmp_path), named):
        with pytest.raises(ConfigError, match=f"^{newest}: no whole checkpoint, .*: put it back, name another with "):
            screen.checkpoint(one)
    assert resumes_after(tmp_path) is None
    named.trainer.resume_from_path = str(before)
    assert screen.checkpoint(named) == before
    (tmp_path / TRACKER).write_text("")  # where the disk was full
    with pytest.raises(ConfigError, match="global_step_: no whole checkpoint"):
        screen.checkpoint(config(tmp_path))


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

sam_recipe.trainer.NodeLostError: node 10.0.0.2 is lost: its Ray
"""
REFUSED = """ray.exceptions.RayTaskError(ConfigError): ray::TaskRunner.run()
sam_recipe.launch.config.ConfigError: dtype=x [config.vllm]
"""
UNLOADABLE = """ray.exceptions.ActorDiedError: The actor died because of an error raised in its creation task, ray::A()
RuntimeError: Error loading module from module_path='/my/reward.py'
"""
UNREADABLE = "  File worker.py, line 3, in load_checkpoint\n_pickle.UnpicklingError: invalid load key, '\\x00'.\n"
GONE = "RuntimeError: every response failed in round 1 of step 3: data_source 'x': a.py:1: EngineDeadError: gone"
SERVER, ENGINE = (
    {"a rollout server": "a rollout server (process 7)"},
    {"the vLLM engine": "the vLLM engine (process 8)"},
)


@pytest.mark.parametrize(
    ("code", "dead", "text", "said"),
    [
        (1, SERVER, DEAD_ACTOR, "a rollout server (process 7) was killed or crashed"),
        (1, SERVER | ENGINE, GONE, "the vLLM engine (process 8) was killed or crashed"),
        (1, SERVER, EXCEPTION, "a rollout server (process 7) was killed or crashed"),
        (1, {}, DEAD_ACTOR, "a worker of the trainer was killed or crashed on 10.0.0.2"),
        (1, {}, LOST_NODE, "node 10.0.0.2 is lost: its Ray"),
        (1, {}, EXCEPTION, "ValueError: train_batch_size must be positive"),
        (1, {}, REFUSED, "dtype=x [config.vllm]"),
        (1, {}, UNLOADABLE, "RuntimeError: Error loading module from module_path='/my/reward.py'"),
        (1, {}, UNREADABLE, "/a/global_step_6 cannot be loaded (_pickle.UnpicklingError: invalid load key, '\\x00'.)"),
        (137, {}, "", "the run's own process was killed (signal 9)"),
        (3, {}, "", "the run ended with exit code 3"),
    ],
)
def test_reason(tmp_path, code, dead, text, said):
    ending = failed(code, dead, text, tmp_path, "/a/global_step_6")
    assert (ending.code, ending.reason) == (code, said)


@pytest.mark.parametrize("size", [1, 10**6])
def test_full_disk(tmp_path, size):
    """The kernel answers every write to /dev/full as a full disk does; torch then says it in its own words."""
    with pytest.raises(RuntimeError) as raised:
        torch.save(torch.zeros(size), "/dev/full")
    ending = failed(1, {}, "".join(traceback.format_exception(raised.value)), tmp_path, None)
    assert ending.reason == f"no space left on the disk of {tmp_path}"


def test_last_line_says_how_to_go_on(tmp_path):
    assert last_line(tmp_path, Ending(1, "it rained", "wait")) == (
        f"error: it rained, while starting; log: {tmp_path}/train.log; wait; then the same command starts from the "
        "beginning (no checkpoint to go on from)"
    )
    (tmp_path / "state.json").write_text('{"phase": "running"}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    folder = checkpoint(tmp_path, 1)
    OmegaConf.save(config(tmp_path), tmp_path / "config.yaml")
    line = last_line(tmp_path, Ending(1, "it rained"))
    assert ", in step 3; " in line and line.endswith("; the same command goes on after step 1")
    said = f"finished after 2 steps; log: {tmp_path}/train.log; look at it: sam report {tmp_path}"
    assert last_line(tmp_path, Ending(0)) == said
    line = last_line(tmp_path, failed(1, {}, UNREADABLE, tmp_path, folder))
    assert line.endswith("or begin again with trainer.resume_mode=disable"), "the same command would fail again"


ROW = {"rollout/reward_all/mean": 0.25, "response_length/mean": 84.6, "timing_s/step": 9.04, "actor/lr": 1.0}
WARNING = "(TaskRunner pid=7) WARNING 11-28 09:00:00 [sam.vllm.proposer] drafting failed\n"


def test_phases_steps_and_warnings_are_lines(tmp_path, capsys):
    (log := tmp_path / "train.log").write_text(WARNING)
    bar = Progress(tmp_path, total_steps=10, first=4)
    for phase in ("starting Ray", "starting the engines", "weight_sync", "first validation", "running"):
        (tmp_path / "state.json").write_text(json.dumps({"phase": phase}))
        bar.update()
    (metrics := tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": n} | ROW) + "\n" for n in range(8)))
    bar.update()
    metrics.write_text("".join(json.dumps({"step": n} | ROW) + "\n" for n in (1, 8)))  # written anew by a resumed run
    log.write_text(WARNING * 3)
    bar.update()
    steps = [f"training: step {n} of 10: 9.0 s, reward +0.25, response 85 tokens" for n in (5, 6, 7, 8)]
    phases = ["starting Ray", "starting the engines", "first validation"]
    said = "warning: sam.vllm.proposer: drafting failed"
    assert capsys.readouterr().err.splitlines() == [*phases, *steps, said]
