"""The socket by which verl's trainer hands weights to the vLLM engine beside it: one for each run on a machine.

verl names it after the Ray job, the replica and the rank, below /tmp (https://github.com/verl-project/verl/pull/6246).
Every Ray counts its jobs from one, so runs that start a Ray of their own are all job 01000000, and two of them on one
machine take each other's socket: an engine waits for ever, or may get the other run's weights. Here the name bears the
Ray session too, which is unique: in recipe.trainer.actor_worker (sender) and recipe.rollout.server (receiver). Can
go once verl's is.
"""

import ray


def job_and_session() -> str:
    """A name that no other run on the machine has; verl's engines use it as the Ray job in the socket's name."""
    context = ray.get_runtime_context()
    return f"{context.get_job_id()}-{context.get_session_name().removeprefix('session_')}"


def with_session(handle: str, job_and_session: str) -> str:
    """verl's ZeroMQ address of a rank, with the session in it.

    Raises:
        RuntimeError: the job is not in the address as verl 0.9.1 has it. Sender and receiver would miss each other and
            the first weight sync wait for ever.
    """
    job = job_and_session.partition("-")[0]
    named = handle.replace(f"-{job}-", f"-{job_and_session}-")
    if named == handle:
        raise RuntimeError(
            f"verl's weight-sync socket is {handle}, expected the Ray job -{job}- in its name: install the pinned verl "
            "(requirements/), or fix recipe/rollout/weight_sync.py for this one"
        )
    return named
