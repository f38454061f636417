"""A process that plays the engines of a machine for the load bench: real clients with their threads, a real relay.

Tokens say what they are.

`python -m sam.sharing.played_engines` is started by `sam.sharing.bench`; it reads a Part as JSON and lines "start" and
"stop", and prints lines of JSON.
"""

import functools
import gc
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sam.drafting.token_ids import digest
from sam.sharing.arrivals import Arrivals
from sam.sharing.client import Client
from sam.sharing.messages import Message, Reply, nothing
from sam.sharing.relay import RelayTransport
from sam.sharing.shard import Cluster

PROMPT_TOKENS = 1
LONGEST_MS = 20_000  # of the histogram; whatever took longer is counted there
SWITCH_SECONDS = 5e-4  # between threads: played engines share an interpreter, real ones have one each
NICER = 10  # than the shard, whose core they share: real engines run elsewhere
START_SECONDS = 60.0  # for a relay to join Ray
GRACE_SECONDS = 60.0  # for text to arrive after the last token has been appended


class Load(NamedTuple):
    """What the engines do.

    Attributes:
        engines: in all processes.
        requests: that run in each engine.
        tokens_per_second: of each request; an engine step appends one token to each.
        group_size: requests of a prompt; they run on engines that follow each other.
        seconds: for which engines append.
        interval_ms: between the messages of a client.
        seed: of the tokens.
    """

    engines: int
    requests: int
    tokens_per_second: int
    group_size: int
    seconds: int
    interval_ms: int
    seed: int = 0

    @property
    def steps(self) -> int:
        """Of an engine; also the tokens of a response."""
        return self.seconds * self.tokens_per_second


class Part(NamedTuple):
    """The machine that one process plays: engines `first`, `first` + `machines` and so on.

    Attributes:
        times: file of float64 [engines, steps], seconds of the machine's steady clock at which each step's tokens were
            appended.
    """

    load: Load
    cluster: Cluster
    first: int
    machines: int
    times: str

    @property
    def machine(self) -> str:
        """The machine that is played: its engines share a relay."""
        return f"-{self.first}"


def tokens_of(seed: int, requests: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """int32, the token at each position of each request: the request's number first, then a hash of both."""
    mixed = (np.asarray(requests, np.uint64) + np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = mixed + np.asarray(positions, np.uint64) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(29)
    hashed = ((mixed * np.uint64(0x94D049BB133111EB)) >> np.uint64(33)).astype(np.int32)
    return np.where(np.asarray(positions) == 0, requests, hashed).astype(np.int32)


class CountingTransport(RelayTransport):
    """Counts messages and their bytes, in both directions."""

    def __init__(self, cluster: Cluster, machine: str, counts: dict[str, int]):
        super().__init__(cluster, machine)
        self._counts = counts

    def ask(self, shard: int, message: Message):
        """As RelayTransport's."""
        self._counts["messages"] += 1
        self._counts["bytes_in"] += message.nbytes
        return super().ask(shard, message)

    def take(self, answer) -> Reply:
        """As RelayTransport's."""
        reply = super().take(answer)
        self._counts["bytes_out"] += reply.nbytes
        return reply


class PlayedEngine:
    """One engine's requests, its client, and what it has received.

    Attributes:
        num_taken: tokens taken.
        received: requests elsewhere, with the tokens received of each; known once all is compared.
        wrong: tokens that are not what was written, or not where they belong.
        latencies: int64 [LONGEST_MS], tokens by the milliseconds from their appending until they could be drafted from.
    """

    def __init__(self, part: Part, engine: int, times: np.ndarray):
        load = part.load
        self.load, self.engine, self.times = load, engine, times
        self.step = self.wrong = self.num_taken = 0
        self.counts = dict.fromkeys(("messages", "bytes_in", "bytes_out"), 0)
        self.requests = engine + load.engines * np.arange(load.requests)
        self.received: dict[int, int] = {}
        self.latencies = np.zeros(LONGEST_MS, np.int64)
        self._slots, self._offsets = np.arange(load.requests), np.arange(load.requests + 1)
        self._texts = tokens_of(load.seed, self.requests[None, :], np.arange(load.steps)[:, None])
        self._arrived: list[tuple[Arrivals, float]] = []  # with the seconds at which they could be drafted from
        connect = functools.partial(CountingTransport, part.cluster, part.machine, self.counts)
        self.client = Client(connect, part.cluster.run_id, part.cluster.shards, load.interval_ms / 1e3)
        self.client.receive = self.receive
        for slot, request in enumerate(self.requests.tolist()):
            self.client.put("start", slot, key_of(request // load.group_size), 0, PROMPT_TOKENS)

    def append_step(self) -> None:
        """Append a token to each request, as an engine's step does."""
        positions = np.full(self.load.requests, self.step + PROMPT_TOKENS)
        self.times[self.engine, self.step] = time.monotonic()
        self.client.put("append", self._slots, positions, self._texts[self.step], self._offsets)
        self.step += 1

    def receive(self, part: Arrivals) -> None:
        """Keep what arrives, called by the client's thread; it is compared when all is over."""
        self._arrived.append((part, time.monotonic()))
        self.num_taken += len(part.tokens)

    def compare(self) -> None:
        """Compare what was taken with what was written, token by token, and find how late it was."""
        most = 1 + max((int(part.numbers.max()) for part, _ in self._arrived), default=0)
        request_of, lengths = np.zeros((2, most), np.int64)
        for part, now in self._arrived:
            starts = part.positions == 0
            request_of[part.numbers[starts]] = part.tokens[
                part.offsets[:-1][starts]
            ]  # a response's first token names it
            counts = np.diff(part.offsets)
            self.wrong += int((lengths[part.numbers] != part.positions).sum())
            lengths[part.numbers] = part.positions + counts
            requests = np.repeat(request_of[part.numbers], counts)
            positions = np.repeat(part.positions - part.offsets[:-1], counts) + np.arange(len(part.tokens))
            self.wrong += int((tokens_of(self.load.seed, requests, positions) != part.tokens).sum())
            waited = (now - self.times[requests % self.load.engines, positions % self.load.steps]) * 1e3
            self.latencies += np.bincount(np.clip(waited, 0, LONGEST_MS - 1).astype(np.int64), minlength=LONGEST_MS)
        self.received = dict(zip(request_of.tolist(), lengths.tolist(), strict=True))

    def elsewhere(self) -> list[int]:
        """Requests in this engine's groups that run in other engines."""
        size = self.load.group_size
        groups = np.unique(self.requests // size)
        siblings = (groups[:, None] * size + np.arange(size)).ravel()
        return siblings[siblings % self.load.engines != self.engine].tolist()

    def missing(self) -> int:
        """Tokens that were to be written elsewhere and have not arrived."""
        return sum(max(0, self.load.steps - self.received.get(request, 0)) for request in self.elsewhere())


def key_of(group: int) -> bytes:
    """The key under which a group's text is shared."""
    return digest(np.array([group], np.int32))


def play(engines: list[PlayedEngine], load: Load, begin: float) -> float:
    """Append each engine's steps at their times, engines spread over a step's time.

    Returns:
        Seconds by which the latest step was late.
    """
    latest = 0.0
    for step in range(load.steps):
        for engine in engines:
            due = begin + (step + engine.engine / load.engines) / load.tokens_per_second
            if (left := due - time.monotonic()) > 0:
                time.sleep(left)
            else:
                latest = max(latest, -left)
            engine.append_step()
    return latest


def finish(engines: list[PlayedEngine]) -> None:
    """Wait for what is on its way, until all has arrived."""
    deadline = time.monotonic() + GRACE_SECONDS
    expected = sum(len(engine.elsewhere()) * engine.load.steps for engine in engines)
    while sum(engine.num_taken for engine in engines) < expected and time.monotonic() < deadline:
        time.sleep(0.02)
    for engine in engines:
        engine.client.stop()
        engine.compare()


def _counts(engines: list[PlayedEngine]) -> dict[str, int]:
    return {name: sum(engine.counts[name] for engine in engines) for name in engines[0].counts}


def _cpu_seconds() -> float:
    """Of this process and its relay."""
    import psutil

    times = [process.cpu_times() for process in (psutil.Process(), *psutil.Process().children())]
    return sum(one.user + one.system for one in times)


def say(**what) -> None:
    print(json.dumps(what), flush=True)


def report_progress(engines: list[PlayedEngine], ended: threading.Event) -> None:
    """A line a second."""
    while not ended.wait(1.0):
        say(appended=sum(engine.step for engine in engines) * engines[0].load.requests)


def main() -> None:
    sys.setswitchinterval(SWITCH_SECONDS)
    os.nice(NICER)
    gc.disable()  # what has arrived is kept until the end: each collection would look at all of it
    load, cluster, *rest = json.loads(sys.argv[1])
    part = Part(Load(*load), Cluster(*cluster), *rest)
    load = part.load
    times = np.memmap(Path(part.times), np.float64, "r+", shape=(load.engines, load.steps))
    numbers = range(part.first, load.engines, part.machines)
    engines = [PlayedEngine(part, number, times) for number in numbers]
    door = RelayTransport(part.cluster, part.machine)
    door.wait([door.ask(0, nothing(part.cluster.run_id))], START_SECONDS)  # until it has joined Ray
    for engine in engines:
        engine.client.start()
    say(ready=True)
    begin, ended = float(sys.stdin.readline()), threading.Event()
    time.sleep(max(0.0, begin - time.monotonic()))
    before = _counts(engines)
    reporter = threading.Thread(target=report_progress, args=(engines, ended), daemon=True)
    reporter.start()
    cpu = _cpu_seconds()
    late = play(engines, load, begin)
    played, cpu = time.monotonic(), _cpu_seconds() - cpu
    counts = {name: count - before[name] for name, count in _counts(engines).items()}
    finish(engines)
    ended.set()
    reporter.join()
    say(
        missing=sum(engine.missing() for engine in engines),
        wrong=sum(engine.wrong for engine in engines),
        errors=sum(engine.client.counters["sharing_errors"] for engine in engines),
        late_seconds=late,
        played=played,
        cpu_seconds=cpu,
        latencies=np.trim_zeros(sum(engine.latencies for engine in engines), "b").tolist(),
        **counts,
    )
    sys.stdin.readline()  # the shards are looked at before the clients end


if __name__ == "__main__":
    main()
