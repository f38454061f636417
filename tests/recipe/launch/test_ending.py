"""The last line of a run says why it ended, and its directory agrees with it; a checkpoint that a power failure has cut
off is named, and the one before it is gone on from."""

import os
import time

import pytest
import torch
from omegaconf import OmegaConf

from sam_recipe.launch import checkpoints
from sam_recipe.launch.ending import ERROR_FILE, Ending, failed, last_line, who_died, write_error
from sam_recipe.record import read_json

RANKS = 2
KINDS = ("model", "optim", "extra_state")
NEW = (0, None, [])
TRACKER = "checkpoints/latest_checkpointed_iteration.txt"


def checkpoint(run_directory, step):
    folder = run_directory / "checkpoints" / f"global_step_{step}"
    (folder / "actor" / "huggingface").mkdir(parents=True)
    names = [f"actor/{kind}_world_size_{RANKS}_rank_{rank}.pt" for kind in KINDS for rank in range(RANKS)]
    for name in ("data.pt", *names):
        torch.save({"numbers": torch.arange(1000) + step}, folder / name)
    (folder / "actor" / "fsdp_config.json").write_text('{"world_size": 2}')
    (run_directory / TRACKER).write_text(str(step))
    return folder


def config(run_directory, **trainer):
    folder = {"default_local_dir": str(run_directory / "checkpoints")}
    actor = {"checkpoint": {"load_contents": ["model", "optimizer", "extra"]}}
    trainer = {"resume_mode": "auto", "resume_from_path": None, **folder, **trainer}
    content = {"run_dir": str(run_directory), "trainer": trainer, "actor_rollout_ref": {"actor": actor}}
    return OmegaConf.create(content)


def half(content):
    return content[: len(content) // 2]


def cut(path):
    path.write_bytes(half(path.read_bytes()))


def flip(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]


MODEL, OPTIMIZER = (f"actor/{kind}_world_size_2_rank_{rank}.pt" for kind, rank in (("model", 1), ("optim", 0)))
# What harms files, none of which are left without it, and what is said.
DAMAGES = [
    (half, MODEL, f"{MODEL} is cut off or damaged"),
    (half, "actor/fsdp_config.json", "actor/fsdp_config.json cannot be read"),
    (lambda content: b"", OPTIMIZER, f"{OPTIMIZER} is cut off or damaged"),
    (lambda content: bytes(len(content)), OPTIMIZER, f"{OPTIMIZER} is cut off or damaged"),
    (flip, MODEL, f"{MODEL} is damaged at "),
    (None, MODEL, f"{MODEL} is missing"),
    (None, "actor/optim_world*", f"{OPTIMIZER} is missing"),
]


@pytest.mark.parametrize(("harm", "files", "said"), DAMAGES)
def test_a_run_goes_on_from_the_newest_that_can_be_read(tmp_path, harm, files, said):
    before, newest = checkpoint(tmp_path, 3), checkpoint(tmp_path, 6)
    assert checkpoints.find(config(tmp_path)) == (6, newest, [])
    for path in newest.glob(files):
        path.write_bytes(harm(path.read_bytes())) if harm else path.unlink()
    step, folder, (skipped,) = checkpoints.find(config(tmp_path))
    assert (step, folder) == (3, before)
    assert skipped.startswith(f"{newest} cannot be read: ") and said in skipped
    assert (tmp_path / TRACKER).read_text() == "3", "what verl goes by"
    # Named, it is refused, with what to set.
    named = config(tmp_path, resume_mode="resume_path", resume_from_path=str(newest))
    with pytest.raises(ValueError) as raised:
        checkpoints.find(named)
    problem, remedy = raised.value.args
    assert said in problem and remedy == f"go on with trainer.resume_mode=resume_path trainer.resume_from_path={before}"


def test_where_none_can_be_read_the_run_does_not_begin_again_by_itself(tmp_path):
    for step in (3, 6):
        cut(checkpoint(tmp_path, step) / MODEL)
    with pytest.raises(ValueError, match="global_step_6 cannot be read: .*; .*global_step_3 cannot be read: "):
        checkpoints.find(config(tmp_path))
    assert checkpoints.find(config(tmp_path, resume_mode="disable")) == NEW
    (checkpoint(tmp_path / "first", 1) / "data.pt").unlink()
    (tmp_path / "first" / TRACKER).unlink()
    assert checkpoints.find(config(tmp_path / "first")) == NEW, "a first one that was not finished is none"


@pytest.mark.parametrize("tracker", ["", "six", None, "9"])
def test_a_tracker_that_says_nothing_is_repaired(tmp_path, tracker):
    """verl leaves it empty where the disk was full, and would begin again where it is missing."""
    for step in (3, 6):
        checkpoint(tmp_path, step)
    (tmp_path / TRACKER).unlink() if tracker is None else (tmp_path / TRACKER).write_text(tracker)
    assert checkpoints.find(config(tmp_path))[0] == 6
    assert (tmp_path / TRACKER).read_text() == "6"


def test_checkpoints_may_lie_elsewhere(tmp_path):
    checkpoint(tmp_path / "disk", 3)
    (tmp_path / "run").mkdir()
    elsewhere = config(tmp_path / "run", default_local_dir=str(tmp_path / "disk" / "checkpoints"))
    assert checkpoints.find(elsewhere)[0] == 3
    OmegaConf.save(elsewhere, tmp_path / "run" / "config.yaml")
    assert checkpoints.resumes_after(tmp_path / "run") == 3


def test_a_checkpoint_that_only_its_reader_finds_damaged_is_named_and_given_up(tmp_path):
    """torch reads pickles, which no table of contents tells about."""
    before, newest = checkpoint(tmp_path, 3), checkpoint(tmp_path, 6)
    text = "  File worker.py, line 3, in load_checkpoint\n_pickle.UnpicklingError: invalid load key, '\\x00'.\n"
    ending = failed(1, None, {"type": "RayTaskError", "text": text}, tmp_path, newest)
    line = last_line(tmp_path, ending)
    assert line.startswith(f"error: {newest} cannot be read (_pickle.UnpicklingError: invalid load key, ")
    assert line.endswith(f"; go on with trainer.resume_mode=resume_path trainer.resume_from_path={before}")
    assert checkpoints.give_up(ending.unreadable) and checkpoints.find(config(tmp_path))[0] == 3
    assert not checkpoints.give_up(before)


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
LOST_NODE = f"""{DEAD_ACTOR}
The above exception was the direct cause of the following exception:

sam_recipe.trainer.NodeLostError: node 10.0.0.2 is lost: its Ray
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
        (1, None, LOST_NODE, "node 10.0.0.2 is lost: its Ray"),
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
