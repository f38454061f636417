"""verl's training workers under names of this run's own: their meeting port, and the socket of the weight sync."""

import secrets
from pathlib import Path

from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayWorkerGroup
from verl.workers.engine_workers import ActorRolloutRefWorker

from sam_recipe.rollout import job_and_session

KERNELS_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST, LAST = 20000, 32768  # above the workers' ports of `ray start` (10002 to 19999), below Linux's own default range
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
        handle, own = self.rollout.zmq_handle, job_and_session()
        job = own.partition("-")[0]
        self.rollout.zmq_handle = handle.replace(f"-{job}-", f"-{own}-")
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
    (https://github.com/verl-project/verl/issues/5889). This can go when verl's trainer has a key for its argument
    `master_port_range`.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{"master_port_range": master_port_range(), **kwargs})
        if self._master_port:  # None for a view of workers that another group has started
            print(f"torch.distributed: training workers meet at {self._master_addr}:{self._master_port}", flush=True)


def master_port_range() -> list[int] | None:
    """[first port to try, end), below what the kernel gives out; None, verl's own way, where it leaves no such ports.

    The first is drawn anew for each group: runs that start on one node at the same time seldom try the same port.
    """
    lowest = int(KERNELS_RANGE.read_text().split()[0]) if KERNELS_RANGE.exists() else LAST
    starts = min(lowest, LAST) - ROOM - FIRST
    if starts <= 0:
        return None
    first = FIRST + secrets.randbelow(starts)
    return [first, first + ROOM]
