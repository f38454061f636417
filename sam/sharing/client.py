"""The thread that exchanges text with the log, and hands over what arrives; the engine's own thread does neither.

What fails here costs drafts of siblings elsewhere and nothing else: it is counted, warned of once, and tried again. No
time travels.
"""

import itertools
import logging
import math
import secrets
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from sam.guard import guard
from sam.sharing import log
from sam.sharing.log import Piece

logger = logging.getLogger(__name__)

INTERVAL_SECONDS = 0.1  # between exchanges
MAX_EVENTS = 16384  # of the engine that wait for the thread; further tokens are lost
MAX_ENDED_TOKENS = 1 << 22  # of ended responses that the log lacks
RETRY_SECONDS = 5.0  # after a failure
NO_EXCHANGE = "sharing between replicas: no exchange with the log; drafting goes on without it"
NOT_TAKEN = "sharing between replicas: text from elsewhere could not be taken; drafting goes on without it"
TURN_SECONDS = 1e-3  # behind each part, in which the engine's thread has its turn: a lock is not fair

# docs/metrics.md
COUNTERS = (
    "sharing_sent_tokens",
    "sharing_received_tokens",
    "sharing_lost_tokens",
    "sharing_errors",
    "sharing_engine_ms",
)


@dataclass
class GroupState:
    """What is known of a group here: requests that run, the cursor, and tokens read of each response elsewhere."""

    running: int = 0
    cursor: int = 0
    lengths: dict[tuple[int, int], int] = field(default_factory=dict)


@dataclass
class SharedText:
    """A response of this process; `sent` of its tokens are in the log."""

    key: bytes
    group: GroupState
    number: int
    prompt_tokens: int
    tokens: array = field(default_factory=lambda: array("i"))
    sent: int = 0


class Client:
    """Shares the text of this process's requests, and receives that of their siblings.

    The engine's thread calls `put`, which touches a deque and returns. `receive` is called by the client's thread, with
    whatever text arrives, in parts of less than 2 * PIECE_TOKENS: the engine can neither append nor draft meanwhile.

    Args:
        ask: gives the log's answer to a question, or raises anything.
        clock: seconds, steady.
    """

    def __init__(self, ask: Callable[[bytes], bytes], clock: Callable[[], float] = time.monotonic):
        self.counters: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self.receive: Callable[[list[Piece]], None] = lambda part: None
        self._ask = ask
        self._clock = clock
        self._number = secrets.randbits(31)  # no two clients have the same
        self._requests = itertools.count()
        self._events: deque[tuple] = deque()
        self._texts: dict[int, SharedText] = {}  # of requests that run, by slot
        self._ended: deque[SharedText] = deque()  # those that the log lacks tokens of
        self._groups: dict[bytes, GroupState] = {}
        self._log: int | None = None  # its identity
        self._retry_at = -math.inf  # seconds

    def start(self) -> None:
        """Begin to exchange, in a thread that ends with the process."""
        threading.Thread(target=self._run, name="sam-sharing", daemon=True).start()

    def put(self, event: str, *arguments) -> None:
        """Hand over what the engine's thread has done; tokens are lost if the client's is far behind.

        Args:
            event: start (slot, key, tokens of the prompt), append (slots, positions, tokens, offsets), finish (slot) or
                forget (key): the drafter has dropped the group.
        """
        if event != "append" or len(self._events) < MAX_EVENTS:  # of the others there are a few for each request
            self._events.append((event, *arguments))
        else:
            self.counters["sharing_lost_tokens"] += len(arguments[2])

    def _run(self) -> None:
        while True:
            self.exchange()
            time.sleep(INTERVAL_SECONDS)

    def exchange(self) -> None:
        """One round: give the log what there is, and hand over what it answers."""
        with guard(logger, self.counters, "sharing_errors", NO_EXCHANGE):
            self._take_events()
            if self._clock() < self._retry_at:
                return
            question, ends = self._question()
            if question:
                answer = self._ask(question)
                self._confirm(answer, ends)
                self._hand_over(answer[log.IDENTITY.size :])
            return
        self._retry_at = self._clock() + RETRY_SECONDS

    def _take_events(self) -> None:
        for _ in range(len(self._events)):
            event, *arguments = self._events.popleft()
            getattr(self, f"_{event}")(*arguments)
        while sum(len(text.tokens) - text.sent for text in self._ended) > MAX_ENDED_TOKENS:
            text = self._ended.popleft()
            self.counters["sharing_lost_tokens"] += len(text.tokens) - text.sent

    def _start(self, slot: int, key: bytes, prompt_tokens: int) -> None:
        group = self._groups.setdefault(key, GroupState())
        group.running += 1
        self._texts[slot] = SharedText(key, group, next(self._requests), prompt_tokens)

    def _append(self, slots: np.ndarray, positions: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> None:
        """An engine step's tokens, of each slot tokens[offsets[i]:offsets[i + 1]], from a position of its text on."""
        tokens = np.ascontiguousarray(tokens, np.int32)
        bounds = offsets.tolist()
        for i, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
            text = self._texts.get(slot)
            if text is None:
                continue
            if position - text.prompt_tokens == len(text.tokens):
                text.tokens.frombytes(tokens[bounds[i] : bounds[i + 1]].tobytes())
            else:  # some have been lost, and with them the rest
                self.counters["sharing_lost_tokens"] += bounds[i + 1] - bounds[i]

    def _finish(self, slot: int) -> None:
        text = self._texts.pop(slot, None)
        if text is None:
            return
        text.group.running -= 1
        if text.sent < len(text.tokens):
            self._ended.append(text)

    def _forget(self, key: bytes) -> None:
        self._groups.pop(key, None)

    def _question(self) -> tuple[bytes, list[tuple[SharedText, int]]]:
        """What there is to send and to ask, and how far each text is then sent."""
        cursors = {key: group.cursor for key, group in self._groups.items() if group.running}
        records: dict[bytes, list[bytes]] = {key: [] for key in cursors}
        ends = []
        left = log.MAX_INTEGERS
        for text in (*self._ended, *self._texts.values()):
            part = text.tokens[text.sent : text.sent + left]
            if part:
                records.setdefault(text.key, []).append(log.records_of(self._number, text.number, text.sent, part))
                ends.append((text, text.sent + len(part)))
                left -= len(part)
        stretches = ((key, cursors.get(key, log.NOTHING_WANTED), b"".join(parts)) for key, parts in records.items())
        return log.pack(stretches), ends

    def _confirm(self, answer: bytes, ends: list[tuple[SharedText, int]]) -> None:
        (identity,) = log.IDENTITY.unpack_from(answer)
        for text, end in ends:
            self.counters["sharing_sent_tokens"] += end - text.sent
            text.sent = end
        self._ended = deque(text for text in self._ended if text.sent < len(text.tokens))
        if identity != self._log and self._log is not None:  # it has died, and another has none of what runs
            for text in self._texts.values():
                text.sent = 0
        self._log = identity

    def _hand_over(self, answer: bytes) -> None:
        part = []
        size = 0
        for piece in self._pieces(answer):
            part.append(piece)
            size += len(piece.tokens)
            if size >= log.PIECE_TOKENS:
                self._receive(part, size)
                part = []
                size = 0
        if part:
            self._receive(part, size)

    def _pieces(self, answer: bytes) -> Iterator[Piece]:
        """What is new of each response elsewhere. Behind a gap a response is not read."""
        for key, cursor, records in log.unpack(answer):
            group = self._groups.get(key)
            if group is None:
                continue
            group.cursor = cursor
            for client, request, position, tokens, end in log.read_records(records):
                group.cursor = cursor + end
                length = group.lengths.get((client, request), 0)
                if client != self._number and position <= length < position + len(tokens):
                    group.lengths[client, request] = position + len(tokens)
                    yield Piece(key, (client, request), length, tokens[length - position :])

    def _receive(self, part: list[Piece], size: int) -> None:
        with guard(logger, self.counters, "sharing_errors", NOT_TAKEN):
            self.receive(part)
            self.counters["sharing_received_tokens"] += size
            time.sleep(TURN_SECONDS)
