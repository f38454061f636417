"""The two threads that read and write a history; the engine's own hands them work and never waits.

What fails here costs drafts from earlier steps and nothing else: it is counted, warned of once, and tried again later.
"""

import itertools
import logging
import queue
import secrets
import sqlite3
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from sam.automaton.store import NONE
from sam.config import SpeculationConfig
from sam.drafting.drafter import Drafter
from sam.drafting.token_ids import digest
from sam.history import database, reading
from sam.history.database import EmptyFile, HistoryError, Response
from sam.history.fingerprint import fingerprint

logger = logging.getLogger(__name__)

MAX_WAITING = 8192  # responses to write, and prompts to read; further ones are lost
FLUSH_RESPONSES, FLUSH_SECONDS = 256, 0.5  # of a transaction: at most, and the pause after one
RETRY_SECONDS = 30.0  # after a failure
MAX_TOKENS_A_STEP = 2048  # appended to the drafter in a step, about a millisecond's work
MAX_WAITING_TOKENS = 1 << 22  # that have been read and wait for the engine: nothing more is read then
READ_PROMPTS = 64  # with one connection
MAX_KNOWN_PROMPTS = 1 << 17  # of which is remembered how far they have been read

COUNTERS = (
    "history_written_responses",
    "history_lost_responses",
    "history_found_prompts",
    "history_appended_tokens",
    "history_late_steps",
    "history_errors",
)


class Finished(NamedTuple):
    """A response to write; `tokens` may end in placeholders, which are negative."""

    prompt: bytes
    sync: int  # weight syncs of this process before its end
    tokens: Sequence[int]


class Asked(NamedTuple):
    """A prompt to read, whether the drafter has no text of it, and the engine step of the question."""

    key: bytes
    prompt: np.ndarray
    is_new: bool
    step: int


class Found(NamedTuple):
    """A response that has been read, or the rest of it.

    Attributes:
        prompt, tokens: int32 [length], each.
        is_start: whether the tokens follow the prompt.
        step: in which a prompt's first response was asked for; NONE for the others.
    """

    prompt: np.ndarray
    tokens: np.ndarray
    is_start: bool
    step: int


class HistoryClient:
    """Gives a drafter the earlier responses to each prompt that it meets, and keeps the responses that it sees end.

    The drafter's process asks, since it alone knows which prompts its requests have: the trainer knows messages, and
    not which replica will get them. An answer is there an engine step or two after the prompt's first request.

    Args:
        folder: of the history.
        fingerprint: as sam.history.fingerprint gives it.
        tokens: that this machine's file may hold.
        epochs: versions of the weights of which a prompt's responses are kept.
        counters: where COUNTERS are counted.
    """

    def __init__(
        self, folder: Path, fingerprint: dict[str, str], tokens: int, epochs: int, counters: dict | None = None
    ):
        self.folder, self.fingerprint, self.tokens, self.epochs = folder, fingerprint, tokens, epochs
        self.counters = counters if counters is not None else {}
        self.counters.update(dict.fromkeys(COUNTERS, 0))
        self.writer = secrets.randbits(62)
        self._sync = self._step = 0
        self._keys: dict[str, bytes] = {}  # of the requests that run
        self._running: dict[bytes, int] = {}  # requests of each prompt
        self._finished: queue.Queue[Finished] = queue.Queue(MAX_WAITING)
        self._asked: queue.Queue[Asked] = queue.Queue(MAX_WAITING)
        self._found: deque[Found] = deque()
        self._read_up_to: dict[bytes, dict[Path, int]] = {}
        self._base: int | None = None  # newest version in the file when this process began to write
        self._stopped = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(work,), name=f"sam-history-{name}", daemon=True)
            for name, work in {"writer": self.write, "reader": self.read}.items()
        ]

    @classmethod
    def of_engine(cls, config: SpeculationConfig, model_config, counters: dict) -> Self | None:
        """For an engine's drafter; None without a folder. `model_config` is vLLM's, whose `model` is read."""
        if config.history_path is None:
            return None
        written_in, bounds = fingerprint(str(model_config.model)), (config.history_tokens, config.history_epochs)
        return cls(Path(config.history_path), written_in, *bounds, counters)

    def start(self) -> None:
        """Begin to read and write."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Write what waits and end the threads; a process need not, they end with it."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def weights_updated(self) -> None:
        """Responses that start from now on are of newer weights."""
        self._sync += 1

    def request_started(self, request_id: str, prompt: np.ndarray, drafter: Drafter) -> None:
        """Ask for earlier responses to int32 [length] `prompt`, unless its requests run here already.

        To be called before the drafter follows the request: whether it knows the prompt decides what it lacks.
        """
        prompt = np.array(prompt, np.int32)
        key = self._keys[request_id] = digest(prompt)
        self._running[key] = self._running.get(key, 0) + 1
        if self._running[key] == 1:
            is_new = drafter.groups.find(prompt) == NONE
            try:
                self._asked.put_nowait(Asked(key, prompt, is_new, self._step))
            except queue.Full:
                self._count_error("more prompts than can be read")

    def request_finished(self, request_id: str, tokens: Sequence[int]) -> None:
        """Keep a response: all of its token ids, which nobody changes any more."""
        if (key := self._keys.pop(request_id, None)) is None:
            return
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]
        try:
            self._finished.put_nowait(Finished(key, self._sync, tokens))
        except queue.Full:
            self.counters["history_lost_responses"] += 1

    def deliver(self, drafter: Drafter) -> None:
        """Append what has been read to the drafter, as far as a step may take."""
        self._step += 1
        left = MAX_TOKENS_A_STEP
        while left > 0 and self._found:
            prompt, tokens, is_start, asked = self._found.popleft()
            piece, rest = tokens[:left], tokens[left:]
            if drafter.append_earlier(prompt, piece, is_start):
                self.counters["history_appended_tokens"] += len(piece)
            if asked != NONE:
                self.counters["history_found_prompts"] += 1
                self.counters["history_late_steps"] += self._step - asked
            if len(rest):
                self._found.appendleft(Found(prompt, rest, False, NONE))
            left -= len(piece)

    def _work(self, work) -> None:
        while True:
            try:
                return work()
            except Exception as error:  # a thread that ends would lose all that comes
                self._count_error(f"{error}")
                if self._stopped.wait(RETRY_SECONDS):
                    return

    def _count_error(self, failure: str) -> None:
        if self.counters["history_errors"] == 0:
            logger.warning("history of responses: %s; drafting goes on without (logged once, then counted)", failure)
        self.counters["history_errors"] += 1

    def write(self) -> None:
        """Write what is handed over until the client stops. Raises what SQLite raises, and HistoryError."""
        file = database.own_file(self.folder)
        with closing(database.open_to_write(file, self.fingerprint)) as connection:
            if self._base is None:
                self._base = max(map(self._newest_version, database.files(self.folder)))
            while not (self._stopped.is_set() and self._finished.empty()):
                if batch := self._take_finished():
                    self._write(connection, batch)
                if self._finished.qsize() < FLUSH_RESPONSES:
                    self._stopped.wait(FLUSH_SECONDS)

    def _newest_version(self, file: Path) -> int:
        try:
            with closing(database.open_to_read(file, self.fingerprint)) as connection:
                return database.newest_version(connection)
        except (HistoryError, sqlite3.Error) as error:  # another machine's file
            self._count_error(f"{error}")
            return 0

    def _take_finished(self) -> list[Finished]:
        return [self._finished.get_nowait() for _ in range(min(FLUSH_RESPONSES, self._finished.qsize()))]

    def _write(self, connection: sqlite3.Connection, batch: list[Finished]) -> None:
        responses = []
        for prompt, sync, tokens in batch:
            known = np.array(list(itertools.takewhile(lambda token: token >= 0, tokens)), np.int32)
            if len(known) > 1:  # nothing follows a single token
                responses.append(Response(prompt, self._base + sync, known))
        try:
            database.add(connection, responses, self.writer, self.tokens, self.epochs)
        except sqlite3.Error:
            self.counters["history_lost_responses"] += len(responses)
            raise
        self.counters["history_written_responses"] += len(responses)

    def read(self) -> None:
        """Answer what is asked until the client stops."""
        while not self._stopped.is_set():
            if sum(len(found.tokens) for found in list(self._found)) > MAX_WAITING_TOKENS:
                self._stopped.wait(0.05)
                continue
            try:
                asked = [self._asked.get(timeout=FLUSH_SECONDS)]
            except queue.Empty:
                continue
            asked += [self._asked.get_nowait() for _ in range(min(READ_PROMPTS, self._asked.qsize()))]
            self._answer(asked)
            for _ in asked:
                self._asked.task_done()

    def _answer(self, asked: list[Asked]) -> None:
        rows: list[list[tuple]] = [[] for _ in asked]
        if len(self._read_up_to) > MAX_KNOWN_PROMPTS:
            self._read_up_to.clear()
        for one in asked:
            if one.is_new:
                self._read_up_to.pop(one.key, None)
        for file in database.files(self.folder):
            try:
                with suppress(EmptyFile), closing(database.open_to_read(file, self.fingerprint)) as connection:
                    for one, found in zip(asked, rows, strict=True):
                        found += self._new_rows(connection, file, one)
            except (HistoryError, sqlite3.Error) as error:
                self._count_error(f"{error}")
        for one, found in zip(asked, rows, strict=True):
            self._put_found(one, found)

    def _new_rows(self, connection: sqlite3.Connection, file: Path, asked: Asked) -> list[tuple]:
        """Of one file: all, or what other processes have written since the prompt was last read."""
        ids = self._read_up_to.setdefault(asked.key, {})
        found = reading.read(connection, asked.key, ids.get(file, 0), None if asked.is_new else self.writer)
        ids[file] = max([ids.get(file, 0), *(row.id for row in found)])
        return found

    def _put_found(self, asked: Asked, rows: list[reading.Row]) -> None:
        """Those of the newest weights first: a step takes a part."""
        kept = sorted({row.version for row in rows})[-self.epochs :]
        step = asked.step
        for row in sorted(rows, key=lambda row: -row.version):
            if row.version not in kept:
                continue
            if (tokens := row.response()) is None:
                self._count_error(f"response {row.id} is damaged")
                continue
            self._found.append(Found(asked.prompt, tokens, True, step))
            step = NONE
