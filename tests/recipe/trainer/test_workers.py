"""What two runs on one machine must not share: the socket of the weight sync, and the port where workers meet."""

import inspect
from types import SimpleNamespace

import pytest
import ray
from verl.trainer.ppo.v1 import trainer_base
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.vllm_rollout import vllm_rollout
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from sam_recipe import trainer
from sam_recipe.rollout import job_and_session
from sam_recipe.trainer import workers
from sam_recipe.trainer.workers import FIRST, KERNELS_RANGE, ROOM, SessionWorker, master_port_range

SESSIONS = ("session_2026-11-22_19-13-18_000001_25747", "session_2026-11-22_19-13-18_000002_25748")


def sender_handle(monkeypatch, handle=None):
    """What the worker binds to, of verl's own adapter."""
    config = SimpleNamespace(
        tensor_model_parallel_size=1, data_parallel_size=1, pipeline_model_parallel_size=1, layered_summon=False
    )

    def build(worker):
        adapter = vllm_rollout.ServerAdapter(config, None, None)
        worker.rollout = SimpleNamespace(zmq_handle=handle or adapter.zmq_handle)

    monkeypatch.setattr(ActorRolloutRefWorker, "init_model", build)
    worker = object.__new__(SessionWorker)
    worker._is_rollout = True
    worker.init_model()
    return worker.rollout.zmq_handle


def test_both_ends_of_the_weight_sync_agree_and_runs_differ(monkeypatch):
    handles = set()
    for name, value in (("RANK", "0"), ("RAY_LOCAL_WORLD_SIZE", "1"), ("VERL_REPLICA_RANK", "0")):
        monkeypatch.setenv(name, value)
    for session in SESSIONS:
        # As a process of a Ray started by its run itself, whose jobs are counted from one.
        context = SimpleNamespace(get_job_id=lambda: "01000000", get_session_name=lambda session=session: session)
        monkeypatch.setattr(ray, "get_runtime_context", lambda context=context: context)
        monkeypatch.setenv("VERL_RAY_JOB_ID", job_and_session())
        engine = SimpleNamespace(local_rank=0, model_runner=None)
        handles.add(handle := sender_handle(monkeypatch))
        assert handle == vLLMColocateWorkerExtension._get_zmq_handle(engine)
        assert len(handle.removeprefix("ipc://")) < 100  # a socket's path may have 107 characters
    assert len(handles) == len(SESSIONS)
    with pytest.raises(RuntimeError, match="expected the Ray job -01000000- in its name"):
        sender_handle(monkeypatch, "ipc:///tmp/weights-0.sock")


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


def test_verl_still_makes_its_groups_by_the_name_that_is_replaced():
    assert "RayWorkerGroup(\n" in inspect.getsource(trainer_base) and KERNELS_RANGE.is_absolute()


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
    if raised is None:
        trainer.start_ray(num_cpus=2)
    else:
        with pytest.raises(Exception, match=raised):
            trainer.start_ray(num_cpus=2)
    assert asked == [{"num_cpus": 2}] * starts
