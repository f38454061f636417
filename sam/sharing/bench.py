"""How much text shards carry, and how late it arrives: real shards on Ray, clients of many engines on a few machines.

A machine is a process that plays its engines, and their relay.

Each shard is kept on one core. Every token is compared by its reader with what was written.
"""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from sam.sharing.played_engines import LONGEST_MS, Load, Part
from sam.sharing.shard import Cluster, start_shards

START_SECONDS = 3.0  # until all processes begin
SHARD_BYTES = 4 << 30


class Figures(NamedTuple):
    """What a load has shown.

    Attributes:
        load: that was asked for.
        shards: their number.
        appended, delivered: tokens; each is delivered to every engine with a sibling.
        missing, wrong: tokens not delivered, and tokens that are not what was written.
        errors: of clients.
        late_seconds: by which an engine step was late at most: above a few steps the machine is too slow for the load.
        latencies: int64 [milliseconds], tokens by the time from their appending until an engine step took them.
        messages, bytes_in, bytes_out: of all clients, bytes of the arrays.
        calls: of the shards, by the relays; each carries what a machine's clients asked within a few milliseconds.
        seconds: from the first step until the last.
        shard_cpu, client_cpu: CPU seconds of all shards and of all clients' processes.
        shard_rss: bytes that the shards' processes grew by.
        held_tokens, held_bytes: in the shards, by their own count.
    """

    load: Load
    shards: int
    appended: int
    delivered: int
    missing: int
    wrong: int
    errors: int
    late_seconds: float
    latencies: np.ndarray
    messages: int
    calls: int
    bytes_in: int
    bytes_out: int
    seconds: float
    shard_cpu: float
    client_cpu: float
    shard_rss: int
    held_tokens: int
    held_bytes: int

    def percentile(self, percent: float) -> int:
        """Milliseconds from appending to visible that `percent` of the tokens took at most."""
        return int(np.searchsorted(np.cumsum(self.latencies), percent / 100 * self.latencies.sum())) + 1

    def lines(self) -> Iterator[str]:
        """For people."""
        load, mib = self.load, 1 << 20
        yield (
            f"{load.engines} engines x {load.requests} requests x {load.tokens_per_second} tokens/s for "
            f"{self.seconds:.1f} s, groups of {load.group_size}, {self.shards} shard{'s' * (self.shards > 1)} on one "
            f"core each, a message every {load.interval_ms} ms"
        )
        yield f"appended:          {self.appended} tokens, {self.appended / self.seconds:.0f} a second"
        yield (
            f"delivered:         {self.delivered} tokens, {self.missing} missing, {self.wrong} wrong, "
            f"{self.errors} errors"
        )
        yield f"append to visible: p50 {self.percentile(50)} ms, p99 {self.percentile(99)} ms"
        yield (
            f"into the shards:   {self.bytes_in / self.seconds / mib:.2f} MiB/s, "
            f"{self.messages / self.seconds:.0f} messages/s in {self.calls / self.seconds:.0f} calls/s"
        )
        yield f"out of the shards: {self.bytes_out / self.seconds / mib:.2f} MiB/s"
        yield (
            f"CPU:               {100 * self.shard_cpu / self.seconds / self.shards:.0f} % of a core for a shard, "
            f"{100 * self.client_cpu / self.seconds / load.engines:.1f} % for an engine's client, its part of a relay "
            "included"
        )
        yield (
            f"memory:            {self.held_bytes / self.held_tokens:.1f} bytes/token by the shards' count, "
            f"{self.shard_rss / self.held_tokens:.1f} by their processes' growth"
        )
        yield f"latest step:       {1e3 * self.late_seconds:.0f} ms late"


@contextlib.contextmanager
def own_cluster() -> Iterator[None]:
    """A Ray cluster of one machine, which is gone afterwards."""
    import ray

    folder = tempfile.mkdtemp(prefix="ray-")
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    try:
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            configure_logging=False,
            log_to_driver=False,
            object_store_memory=256 << 20,
            _temp_dir=folder,
            runtime_env={"env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, paths))}},
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def measure(load: Load, shards: int, machines: int) -> Figures:
    """Play `load` against `shards` shards."""
    import ray

    with own_cluster(), tempfile.TemporaryDirectory() as folder:
        cluster, handles = start_shards(shards, "bench", SHARD_BYTES)
        pids = [ray.get(handle.state.remote())["pid"] for handle in handles]
        for number, pid in enumerate(pids):
            _keep_on_one_core(pid, number)
        times = Path(folder) / "times"
        with times.open("wb") as file:
            file.truncate(8 * load.engines * load.steps)
        with _playing(load, cluster, machines, times) as players:
            begin = time.monotonic() + START_SECONDS
            for player in players:
                _tell(player, begin)
            time.sleep(START_SECONDS)
            calls = sum(ray.get(handle.state.remote())["calls"] for handle in handles)
            before = [_usage(pid) for pid in pids]
            results = _follow(players, load)
            cpu, rss = np.array([_usage(pid) for pid in pids]).sum(0) - np.array(before).sum(0)
            states = [ray.get(handle.state.remote()) for handle in handles]
    latencies = sum(np.pad(one["latencies"], (0, LONGEST_MS - len(one["latencies"]))) for one in results)
    sums = {name: sum(one[name] for one in results) for name in ("missing", "wrong", "errors", "messages")}
    return Figures(
        load=load,
        shards=shards,
        appended=load.engines * load.requests * load.steps,
        delivered=int(latencies.sum()),
        late_seconds=max(one["late_seconds"] for one in results),
        latencies=latencies,
        bytes_in=sum(one["bytes_in"] for one in results),
        bytes_out=sum(one["bytes_out"] for one in results),
        seconds=max(one["played"] for one in results) - begin,
        shard_cpu=float(cpu),
        client_cpu=sum(one["cpu_seconds"] for one in results),
        shard_rss=int(rss),
        calls=sum(state["calls"] for state in states) - calls,
        held_tokens=sum(state["tokens"] for state in states),
        held_bytes=sum(state["bytes"] for state in states),
        **sums,
    )


@contextlib.contextmanager
def _playing(load: Load, cluster: Cluster, machines: int, times: Path) -> Iterator[list[subprocess.Popen]]:
    players = []
    try:
        for first in range(machines):
            part = json.dumps(Part(load, cluster, first, machines, str(times)))
            command = [sys.executable, "-m", "sam.sharing.played_engines", part]
            players.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        for player in players:
            _answer(player)
        yield players
    finally:
        for player in players:
            player.kill()
            player.wait()


def _tell(player: subprocess.Popen, what) -> None:
    player.stdin.write(f"{what}\n")
    player.stdin.flush()


def _answer(player: subprocess.Popen) -> dict:
    if not (line := player.stdout.readline()):
        raise OSError(f"a process that plays engines has ended with code {player.wait()}: its message is above")
    return json.loads(line)


def _follow(players: list[subprocess.Popen], load: Load) -> list[dict]:
    """Show how far engines are, until all processes have said what they found."""
    results, appended = [None] * len(players), [0] * len(players)
    with tqdm(total=load.engines * load.requests * load.steps, unit="tok", unit_scale=True, disable=None) as bar:
        while None in results:
            for number, player in enumerate(players):
                if results[number] is None:
                    said = _answer(player)
                    if "appended" in said:
                        appended[number] = said["appended"]
                    else:
                        results[number] = said
            bar.update(sum(appended) - bar.n)
    return results


def _keep_on_one_core(pid: int, number: int) -> None:
    import psutil

    process = psutil.Process(pid)
    cores = process.cpu_affinity()
    process.cpu_affinity([cores[-1 - number % len(cores)]])


def _usage(pid: int) -> tuple[float, int]:
    """CPU seconds and resident bytes of a process."""
    import psutil

    process = psutil.Process(pid)
    used = process.cpu_times()
    return used.user + used.system, process.memory_info().rss
