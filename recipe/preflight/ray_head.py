"""Where a run is started and whether it may: on the head node of its Ray cluster, and once in its directory."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import platform
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
from omegaconf import DictConfig

from recipe.launch.config import ConfigError
from recipe.record.run_directory import LOCK_FILE

ANSWER_SECONDS = 5.0  # a head that takes longer to accept a connection is not there
START = (
    "run bash scripts/start_ray_cluster.sh head on one node, worker HEAD_ADDRESS on the others, and start this there"
)


def find_problems(config: DictConfig) -> Iterator[str]:
    """Whether this node is the head of a Ray that runs; nothing is asked of a run that starts a Ray of its own."""
    nodes, address = config.trainer.nnodes, os.environ.get("RAY_ADDRESS")
    if not address:
        if nodes > 1 and (running := cluster_of_this_node()):
            yield (
                f"trainer.nnodes={nodes} and a Ray cluster runs at {running}, but RAY_ADDRESS is not set: start the "
                f"run with its script in scripts/, or export RAY_ADDRESS={running}"
            )
        elif nodes > 1:
            yield f"trainer.nnodes={nodes}, but no Ray runs on this node and RAY_ADDRESS is not set: {START}"
        return
    if address == "auto":
        # Ray then looks for its own processes, which only the cluster's nodes have.
        address = _noted_address() or address
    if address in ("auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        yield f"RAY_ADDRESS={address}: expected HOST:PORT of the Ray cluster's head, for example 10.0.0.1:6379"
    elif not is_here(host):
        yield (
            f"this node, {platform.node()}, is not the head of the Ray cluster RAY_ADDRESS={address}: start the run on "
            f"{host}"
        )
    elif not answers(host, int(port)):
        yield f"RAY_ADDRESS={address}: nothing answers there, Ray has ended or was never started: {START}"


def cluster_of_this_node() -> str | None:
    """HOST:PORT of the cluster that `ray start` made this node join, if its head answers."""
    host, _, port = (_noted_address() or "").rpartition(":")
    return f"{host}:{port}" if host and port.isdigit() and answers(host, int(port)) else None


def _noted_address() -> str | None:
    """What `ray start` writes down on every node; `ray stop` removes it."""
    folder = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    try:
        return (Path(folder) / "ray" / "ray_current_cluster").read_text().strip() or None
    except OSError:
        return None


def answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host.strip("[]"), port), ANSWER_SECONDS).close()
    except OSError:
        return False
    return True


def is_here(host: str) -> bool:
    """Whether a host name or address is one of this machine's."""
    try:
        found = {entry[4][0] for entry in socket.getaddrinfo(host.strip("[]"), None)}
    except OSError:
        return False
    own = {one.address.split("%")[0] for addresses in psutil.net_if_addrs().values() for one in addresses}
    return any(address in own or ipaddress.ip_address(address.split("%")[0]).is_loopback for address in found)


def lock_problem(run_directory: Path) -> str | None:
    """Why a run may not start in its directory: another goes on there. None after one that was killed on this node."""
    path = run_directory / LOCK_FILE
    try:
        holder = json.loads(path.read_text())
        pid, host, started, since = (holder[name] for name in ("pid", "host", "started", "since"))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if host != platform.node():
        return (
            f"run_dir={run_directory} is used by a run on {host} (process {pid}, since {since}): stop it there, choose "
            f"another run_dir=, or, if that node has died, remove {path}"
        )
    try:
        if psutil.Process(pid).create_time() != started:
            return None
    except psutil.Error:
        return None
    return (
        f"run_dir={run_directory} is used by a run that goes on (process {pid}, since {since}): wait for it, stop it, "
        "or choose another run_dir="
    )


@contextlib.contextmanager
def lock(run_directory: Path) -> Iterator[None]:
    """Hold a run's directory: two runs in one would write the same checkpoints and metrics.

    Raises:
        ConfigError: another run holds it.
    """
    if problem := lock_problem(run_directory):
        raise ConfigError(problem)
    run_directory.mkdir(parents=True, exist_ok=True)
    path = run_directory / LOCK_FILE
    path.unlink(missing_ok=True)  # of a run that was killed
    holder = {
        "pid": os.getpid(),
        "host": platform.node(),
        "started": psutil.Process().create_time(),
        "since": datetime.datetime.now().isoformat(sep=" ", timespec="seconds"),
    }
    try:
        with open(path, "x") as file:
            json.dump(holder, file)
    except FileExistsError:
        raise ConfigError(
            f"run_dir={run_directory}: another run started there at this moment: choose another"
        ) from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
