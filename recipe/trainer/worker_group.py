"""verl's group of training workers, which meet on a port that the kernel gives to nobody else.

Cause: verl 0.9.1 (`verl/single_controller/ray/base.py`, get_master_addr_port) lets the kernel choose a free port,
closes it, and torch.distributed listens there seconds later, when the workers have started. In between Ray opens
sockets of its own, to which the kernel gives ports of the same range: now and then a start ends with EADDRINUSE
(https://github.com/verl-project/verl/issues/5889). verl's argument `master_port_range` avoids it, but verl's trainer
has no key for it: this can go when it has.
"""

import secrets
from pathlib import Path

from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.ppo.v1 import trainer_base

KERNELS_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST, LAST = 20000, 32768  # above the workers' ports of `ray start` (10002 to 19999), below Linux's own default range
ROOM = 100  # ports that verl may try after the first


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


class WorkerGroup(RayWorkerGroup):
    """verl's, with a `master_port_range` unless it was given one."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{"master_port_range": master_port_range(), **kwargs})
        if self._master_port:  # None for a view of workers that another group has started
            print(f"torch.distributed: training workers meet at {self._master_addr}:{self._master_port}", flush=True)


def install() -> None:
    """Have verl's trainers make their groups of this class; a second call changes nothing."""
    trainer_base.RayWorkerGroup = WorkerGroup
