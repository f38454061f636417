"""verl's training workers under names of this run's own: their meeting port, and the socket of the weight sync."""

import os
import secrets

import ray
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayWorkerGroup
from verl.workers.engine_workers import ActorRolloutRefWorker

from sam_recipe.rollout import SESSION

# Ports above those of `ray start` for its workers (10002 to 19999), below those that Linux gives out by itself.
FIRST, LAST = 20000, 32768
ROOM = 100  # ports that verl may try after the first


class SessionWorker(ActorRolloutRefWorker):
    """verl's worker, whose weight sync goes through the socket that the rollout's engines look for."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self):
        """verl's, then rename the socket.

        Raises:
            RuntimeError: the job is not in the name as verl 0.9.1 has it. Sender and receiver would miss each other and
                the first weight sync wait for ever.
        """
        super().init_model()
        if not self._is_rollout:
            return
        handle, job = self.rollout.zmq_handle, ray.get_runtime_context().get_job_id()
        self.rollout.zmq_handle = handle.replace(f"-{job}-", f"-{job}{os.environ[SESSION]}-")
        if self.rollout.zmq_handle == handle:
            raise RuntimeError(
                f"verl's weight-sync socket is {handle}, expected the Ray job -{job}- in its name: install the pinned "
                "verl (requirements/), or fix sam_recipe/trainer/workers.py for this one"
            )


class WorkerGroup(RayWorkerGroup):
    """verl's group of training workers, which meet on a port that the kernel gives to nobody else.

    Cause: verl 0.9.1 (`verl/single_controller/ray/base.py`, get_master_addr_port) lets the kernel choose a free port,
    closes it, and torch.distributed listens there seconds later. In between Ray opens sockets, to which the kernel
    gives ports of the same range: now and then a start ends with EADDRINUSE
    (https://github.com/verl-project/verl/issues/5889). Can go when verl's trainer has a key for its argument
    `master_port_range`. The first port is drawn anew: runs that start at once on a node seldom try the same.
    """

    def __init__(self, *args, **kwargs):
        first = FIRST + secrets.randbelow(LAST - ROOM - FIRST)
        super().__init__(*args, **{"master_port_range": [first, first + ROOM], **kwargs})
        if self._master_port:  # None for a view of workers that another group has started
            print(f"torch.distributed: training workers meet at {self._master_addr}:{self._master_port}", flush=True)
