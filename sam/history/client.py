"""The two threads that read and write a history; the engine's own hands them work and never waits."""

import contextlib
import itertools
import logging
import queue
import sqlite3
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Self

import numpy as np

from sam.automaton.store import NONE
from sam.config import SpeculationConfig
from sam.drafting.drafter import Drafter
from sam.drafting.texts import digest
from sam.guard import guard
from sam.history import database

logger = logging.getLogger(__name__)

MAX_WAITING = 8192  # responses to write, and prompts to read; further ones are lost
FLUSH_RESPONSES = 256  # of a transaction at most
FLUSH_SECONDS = 0.5  # of pause after a transaction
RETRY_SECONDS = 30.0  # after a failure
MAX_TOKENS_A_STEP = 2048  # appended to the drafter in a step, about a millisecond's work

# docs/metrics.md
COUNTERS = (
    "history_written_responses",
    "history_lost_responses",
    "history_found_prompts",
    "history_appended_tokens",
    "history_errors",
)


class HistoryClient:
    """Gives a drafter the earlier responses to each prompt that it meets, a step or two after its first request, and
    keeps the responses that it sees end; `tokens` and `epochs` as of `database.add`."""

    def __init__(self, folder: Path, tokenizer: str, tokens: int, epochs: int, counters: dict | None = None):
        self.folder = folder
        self.tokenizer = tokenizer
        self.bounds = (tokens, epochs)
        self.counters = counters if counters is not None else {}
        self.counters.update(dict.fromkeys(COUNTERS, 0))
        self._sync = 0  # weight syncs of this process
        self._base = None  # the newest version that the file had before
        self._keys: dict[str, bytes] = {}  # of the requests that run
        self._finished: queue.Queue[tuple[bytes, int, Sequence[int]]] = queue.Queue(MAX_WAITING)
        self._asked: queue.Queue[tuple[np.ndarray, bool]] = queue.Queue(MAX_WAITING)  # and whether the drafter has none
        self._seen: set[bytes] = set()  # digests of responses that this process has written or read
        # Prompt, response or the rest of it, and whether it follows the prompt.
        self._to_append: deque[tuple[np.ndarray, np.ndarray, bool]] = deque()
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._work, args=(w,), daemon=True) for w in (self.write, self.read)]

    @classmethod
    def of_engine(cls, config: SpeculationConfig, model_config, counters: dict) -> Self | None:
        """For an engine's drafter; None without a folder. `model_config` is vLLM's, whose `model` is read."""
        if config.history_path is None:
            return None
        return cls(
            Path(config.history_path),
            database.fingerprint(str(model_config.model)),
            config.history_tokens,
            config.history_epochs,
            counters,
        )

    def start(self) -> None:
        """Begin to read and write."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Write what waits and end the threads."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def weights_updated(self) -> None:
        """Responses that start from now on are of newer weights."""
        self._sync += 1

    def request_started(self, request_id: str, prompt: np.ndarray, drafter: Drafter) -> None:
        """Ask for responses to int32 [length] `prompt`, unless its requests run here already: all of them, or what
        others have written, if the drafter, which does not follow the request yet, has text of the prompt."""
        prompt = np.array(prompt, np.int32)
        key = digest(prompt)
        try:
            if key not in self._keys.values():
                self._asked.put_nowait((prompt, drafter.groups.find(prompt) == NONE))
        except queue.Full:
            self._count_error("more prompts than can be read")
        self._keys[request_id] = key

    def request_finished(self, request_id: str, tokens: Sequence[int]) -> None:
        """Keep a response: all of its token ids, which nobody changes any more; it may end in negative placeholders."""
        key = self._keys.pop(request_id, None)
        if key is None:
            return
        try:
            self._finished.put_nowait((key, self._sync, tokens))
        except queue.Full:
            self.counters["history_lost_responses"] += 1

    def deliver(self, drafter: Drafter) -> None:
        """Append what has been read to the drafter, as far as a step may take."""
        left = MAX_TOKENS_A_STEP
        while left > 0 and self._to_append:
            prompt, tokens, is_start = self._to_append.popleft()
            piece = tokens[:left]
            rest = tokens[left:]
            if drafter.append_earlier(prompt, piece, is_start):
                self.counters["history_appended_tokens"] += len(piece)
            if len(rest):
                self._to_append.appendleft((prompt, rest, False))
            left -= len(piece)

    def _work(self, work) -> None:
        while True:
            with guard(logger, self.counters, "history_errors", "history of responses; drafting goes on without"):
                return work()
            if self._stopped.wait(RETRY_SECONDS):
                return

    def _count_error(self, failure: Exception | str) -> None:
        if self.counters["history_errors"] == 0:
            logger.warning("history of responses: %s; drafting goes on without (logged once, then counted)", failure)
        self.counters["history_errors"] += 1

    def write(self) -> None:
        """Write what is handed over until the client stops."""
        with closing(database.open_file(database.own_file(self.folder), self.tokenizer, to_write=True)) as connection:
            if self._base is None:
                newest = "SELECT coalesce(max(CAST(version AS INTEGER)), 0) FROM responses"
                (self._base,) = connection.execute(newest).fetchone()
            while not (self._stopped.is_set() and self._finished.empty()):
                batch = [self._finished.get_nowait() for _ in range(min(FLUSH_RESPONSES, self._finished.qsize()))]
                if batch:
                    self._write(connection, batch)
                if self._finished.qsize() < FLUSH_RESPONSES:
                    self._stopped.wait(FLUSH_SECONDS)

    def _write(self, connection: sqlite3.Connection, batch: list[tuple[bytes, int, Sequence[int]]]) -> None:
        responses = []
        for prompt, sync, tokens in batch:
            known = np.array(list(itertools.takewhile(lambda token: token >= 0, tokens)), np.int32)
            if len(known) > 1:  # nothing follows a single token
                responses.append((prompt, self._base + sync, known))
                self._seen.add(digest(known))
        try:
            database.add(connection, responses, *self.bounds)
        except sqlite3.Error:
            self.counters["history_lost_responses"] += len(responses)
            raise
        self.counters["history_written_responses"] += len(responses)

    def read(self) -> None:
        """Answer what is asked until the client stops."""
        while not self._stopped.is_set():
            with contextlib.suppress(queue.Empty):
                self._answer(*self._asked.get(timeout=FLUSH_SECONDS))
                self._asked.task_done()

    def _answer(self, prompt: np.ndarray, is_new: bool) -> None:
        """Find a prompt's responses, those of the newest weights first, since a step takes a part."""
        responses = []
        key = digest(prompt)

        def read(connection: sqlite3.Connection) -> None:
            responses.extend(database.read(connection, key))

        database.read_files(self.folder, self.tokenizer, read, self._count_error)
        if not is_new:
            responses = [response for response in responses if response.digest not in self._seen]
        is_found = False
        for _version, response_digest, tokens in sorted(responses, key=lambda response: -response.version):
            self._seen.add(response_digest)
            if tokens is None:
                self._count_error("a response is damaged")
            else:
                self._to_append.append((prompt, tokens, True))
                is_found = True
        self.counters["history_found_prompts"] += is_found
