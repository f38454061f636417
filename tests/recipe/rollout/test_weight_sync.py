"""Two runs on one machine, each with a Ray of its own, keep their weights apart."""

from types import SimpleNamespace

import pytest
import ray
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.vllm_rollout import vllm_rollout
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from recipe.trainer.workers import SessionWorker, job_and_session, with_session

SESSIONS = ("session_2026-11-22_19-13-18_000001_25747", "session_2026-11-22_19-13-18_000002_25748")


def use_session(monkeypatch, session):
    """As a process of a Ray started by its run itself, whose jobs are counted from one."""
    context = SimpleNamespace(get_job_id=lambda: "01000000", get_session_name=lambda: session)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("RAY_LOCAL_WORLD_SIZE", "1")


def sender_handle(monkeypatch):
    """What the worker binds to, of verl's own adapter."""
    config = SimpleNamespace(
        tensor_model_parallel_size=1, data_parallel_size=1, pipeline_model_parallel_size=1, layered_summon=False
    )

    def build(worker):
        worker.rollout = vllm_rollout.ServerAdapter(config, None, None)

    monkeypatch.setattr(ActorRolloutRefWorker, "init_model", build)
    worker = object.__new__(SessionWorker)
    worker._is_rollout = True
    worker.init_model()
    return worker.rollout.zmq_handle


def receiver_handle(monkeypatch):
    """What the engine connects to, of verl's own worker extension and what the server's process hands down."""
    monkeypatch.setenv("VERL_RAY_JOB_ID", job_and_session())
    monkeypatch.setenv("VERL_REPLICA_RANK", "0")
    return vLLMColocateWorkerExtension._get_zmq_handle(SimpleNamespace(local_rank=0, model_runner=None))


def test_both_ends_agree_and_runs_differ(monkeypatch):
    handles = set()
    for session in SESSIONS:
        use_session(monkeypatch, session)
        handle = sender_handle(monkeypatch)
        assert handle == receiver_handle(monkeypatch)
        assert len(handle.removeprefix("ipc://")) < 100  # a socket's path may have 107 characters
        handles.add(handle)
    assert len(handles) == len(SESSIONS)


def test_a_name_of_another_form_is_refused():
    with pytest.raises(RuntimeError, match="expected the Ray job -01000000- in its name"):
        with_session("ipc:///tmp/weights-0.sock", "01000000-2026-11-22_19-13-18_000001_25747")
