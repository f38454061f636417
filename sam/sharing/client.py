"""The thread that exchanges text with the shards, and hands over what arrives; the engine's own thread does neither.

What fails here costs drafts of siblings elsewhere and nothing else: it is counted, warned of once, and tried again with
growing pauses.
"""

import logging
import math
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sam.sharing.arrivals import Arrivals, split
from sam.sharing.messages import Message, Reply
from sam.sharing.view import View

logger = logging.getLogger(__name__)

MAX_EVENTS = 4096  # of the engine that wait for the thread; further ones are lost
PART_TOKENS = 512  # that are handed over at once, while the engine can neither append nor draft: about 0.3 ms
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0  # seconds between attempts to reach a shard
ANSWER_SECONDS = 5.0  # after which a question is taken for lost
STOP_SECONDS = 5.0  # that the engine waits for the thread's last exchange at the end of a run
REST_SECONDS = 1.0  # after its last step an engine rests, and nothing is asked for

# Names of what a client counts, as the metrics have them.
COUNTERS = (
    "sharing_sent_tokens",
    "sharing_received_tokens",
    "sharing_bytes",
    "sharing_lost_tokens",
    "sharing_lag_ms",
    "sharing_errors",
    "sharing_reconnects",
    "sharing_full_replies",
    "sharing_evicted_groups",
    "sharing_thread_ms",
)


class Transport(Protocol):
    """How questions reach the shards. Every call may raise anything but `wait`."""

    def ask(self, shard: int, message: Message) -> Any:
        """Send and return at once; the result stands for the answer."""

    def wait(self, pending: list[Any], seconds: float) -> list[Any]:
        """Those of `pending` whose answers are there, after `seconds` at most."""

    def take(self, answer: Any) -> Reply:
        """An answer that is there."""


@dataclass
class Link:
    """Where the exchange with one shard stands; `retry_at`, `asked` and `pause` are in seconds."""

    shard: int
    message: Message | None = None
    answer: Any = None
    asked: float = 0.0
    retry_at: float = -math.inf
    pause: float = 0.0
    is_down: bool = False


class Client:
    """Shares the text of this process's requests, and receives that of their siblings.

    The engine's thread calls `put`, which touches a deque and returns. Events are the arguments of View's `start`,
    `append`, `finish` and `forget`, by name. `receive` is called by the client's thread, with whatever text arrives, in
    parts of up to PART_TOKENS.

    Args:
        connect: makes a Transport; called by the thread, again after it has failed.
        run_id: of the run; shards of another refuse.
        shards: of the run.
        interval_seconds: between exchanges.
        counters: where COUNTERS are counted.
        clock: seconds, steady.
    """

    def __init__(
        self,
        connect: Callable[[], Transport],
        run_id: str,
        shards: int,
        interval_seconds: float,
        counters: dict[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.view = View(run_id, secrets.randbits(31), shards)
        self.counters = counters if counters is not None else {}
        self.counters.update(dict.fromkeys(COUNTERS, 0))
        self.interval_seconds, self._connect, self._clock = interval_seconds, connect, clock
        self._events: deque[tuple] = deque()
        self.receive: Callable[[Arrivals], None] = lambda part: None
        self._dropped_tokens = 0
        self._stepped = -math.inf  # seconds, when the engine was last seen to take a step
        self._links = [Link(shard) for shard in range(shards)]
        self._evicted = [0] * shards
        self._transport: Transport | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sam-sharing", daemon=True)

    def start(self) -> None:
        """Begin to exchange."""
        self._thread.start()

    def stop(self) -> None:
        """Ask no more: called before the shards end, which would count as a failure. Waits for the last exchange."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS)

    def now(self) -> float:
        """Seconds by the client's clock, as in Arrivals."""
        return self._clock()

    @property
    def is_resting(self) -> bool:
        """Whether the engine has taken no step for a while: between rollouts there is nothing to draft for."""
        return self._clock() - self._stepped > REST_SECONDS

    def put(self, event: str, *arguments) -> None:
        """Hand over an event; it is lost if the thread is far behind. Called by the engine's thread."""
        if len(self._events) < MAX_EVENTS or event in ("finish", "forget"):  # of each there are no more than starts
            self._events.append((event, arguments))
        elif event == "append":
            self._dropped_tokens += len(arguments[2])

    def _run(self) -> None:
        while not self._stopped.is_set():
            began = self._clock()
            try:
                self.exchange(self.interval_seconds)
            except Exception:  # of this code: everything that may fail outside is handled where it is called
                self._count_error("sharing between replicas failed")
            self.counters["sharing_thread_ms"] = round(time.thread_time() * 1e3, 1)
            self._stopped.wait(max(0.0, began + self.interval_seconds - self._clock()))

    def exchange(self, seconds: float = 0.0) -> None:
        """One round: hand the shards what there is, and take the answers that come within `seconds`."""
        self._take_events()
        if self._transport is None:
            self._reconnect()
        if self._transport is None:
            for shard in range(len(self._links)):
                self.view.drop_unconfirmed(shard)
            return
        for link in self._links:
            if link.answer is None:
                self._ask(link)
        deadline = self._clock() + seconds
        while pending := {link.answer: link for link in self._links if link.answer is not None}:
            ready = self._transport.wait(list(pending), max(0.0, deadline - self._clock()))
            for answer in ready:
                self._receive(pending[answer])
            if not ready:
                break
        self._give_up_on_the_silent()
        self.counters["sharing_evicted_groups"] = sum(self._evicted)

    def _take_events(self) -> None:
        if self._events:
            self._stepped = self._clock()
        for _ in range(len(self._events)):
            event, arguments = self._events.popleft()
            if event == "append":
                self._append(*arguments)
            else:
                getattr(self.view, event)(*arguments)
        self.counters["sharing_lost_tokens"] = self._dropped_tokens + self.view.lost_tokens

    def _append(self, slots: np.ndarray, positions: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> None:
        """An engine step's tokens, of each slot tokens[offsets[i]:offsets[i + 1]]."""
        bounds = offsets.tolist()
        for i, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
            self.view.append(slot, position, tokens[bounds[i] : bounds[i + 1]])

    def _reconnect(self) -> None:
        link = self._links[0]
        if self._clock() < link.retry_at:
            return
        try:
            self._transport = self._connect()
        except Exception:
            self._pause(link, "sharing between replicas: no connection")

    def _ask(self, link: Link) -> None:
        if self._clock() < link.retry_at:
            self.view.drop_unconfirmed(link.shard)
            return
        if (message := self.view.message(link.shard, not self.is_resting)) is None:
            return
        try:
            link.answer, link.message, link.asked = self._transport.ask(link.shard, message), message, self._clock()
        except Exception:
            self._pause(link, f"sharing between replicas: shard {link.shard} cannot be asked")
            return
        self.counters["sharing_sent_tokens"] += len(message.tokens)
        self.counters["sharing_bytes"] += message.nbytes

    def _receive(self, link: Link) -> None:
        answer, message, link.answer, link.message = link.answer, link.message, None, None
        try:
            reply = self._transport.take(answer)
            arrivals = self.view.apply(link.shard, message, reply)
        except Exception:
            self._pause(link, f"sharing between replicas: shard {link.shard} failed")
            return
        if link.is_down:
            logger.info("sharing between replicas: shard %d answers again", link.shard)
            self.counters["sharing_reconnects"] += 1
            link.is_down = False
        self.counters["sharing_bytes"] += reply.nbytes
        self._evicted[link.shard] = reply.evicted
        if reply.is_full:  # it has no memory: ask less often, text is kept here
            self.counters["sharing_full_replies"] += 1
            self._pause(link)
        else:
            link.pause = 0.0
        if len(arrivals.tokens):
            for part in split(arrivals._replace(asked=link.asked), PART_TOKENS):
                self._hand_over(part)

    def _hand_over(self, part: Arrivals) -> None:
        try:
            self.receive(part)
        except Exception:
            self._count_error("sharing between replicas: text from elsewhere could not be taken")
            return
        self.counters["sharing_received_tokens"] += len(part.tokens)
        self.counters["sharing_lag_ms"] = round((self._clock() - part.asked) * 1e3, 1)

    def _give_up_on_the_silent(self) -> None:
        """A question without an answer counts as lost; one that is answered later does no harm."""
        for link in self._links:
            if link.answer is not None and self._clock() - link.asked > ANSWER_SECONDS:
                link.answer = link.message = None
                self._pause(link, f"sharing between replicas: shard {link.shard} does not answer")

    def _pause(self, link: Link, failure: str | None = None) -> None:
        link.pause = min(LONGEST_PAUSE, 2 * link.pause or FIRST_PAUSE)
        link.retry_at = self._clock() + link.pause
        if failure:
            link.is_down = True
            self._count_error(failure)

    def _count_error(self, failure: str) -> None:
        if self.counters["sharing_errors"] == 0:
            logger.warning(
                "%s; drafting goes on without it (logged once, then counted)", failure, exc_info=sys.exception()
            )
        self.counters["sharing_errors"] += 1
