"""Shards in this process, behind a channel that can fail as a test asks."""

import numpy as np

from sam.sharing.client import Client
from sam.sharing.groups import Groups
from sam.sharing.messages import Reply

RUN, BUDGET, TTL = "run", 1 << 24, 600.0


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Channel:
    """A Transport to shards in this process.

    Attributes:
        is_down: every question fails when it is asked.
        is_frozen: no question is answered.
        asked, waits, connects: calls.
        between: called while an answer is waited for, as other threads run then.
    """

    def __init__(self, groups: list[Groups], clock: Clock):
        self.groups, self.clock = groups, clock
        self.is_down = self.is_frozen = False
        self.asked, self.waits, self.connects = 0, 0, 0
        self.between = lambda: None
        self._answers: dict[int, Reply | Exception] = {}

    def connect(self):
        self.connects += 1
        if self.is_down:
            raise ConnectionError("nobody listens")
        return self

    def ask(self, shard, message):
        self.asked += 1
        if self.is_down:
            raise ConnectionError("nobody listens")
        try:
            answer = None if self.is_frozen else self.groups[shard].exchange(message, self.clock())
        except Exception as error:
            answer = error
        self._answers[self.asked] = answer
        return self.asked

    def wait(self, pending, seconds):
        self.waits += 1
        self.between()
        return [one for one in pending if self._answers[one] is not None]

    def take(self, answer):
        reply = self._answers.pop(answer)
        if isinstance(reply, Exception):
            raise reply
        return reply


def make_groups(run_id=RUN, budget=BUDGET, ttl=TTL):
    return Groups(run_id, budget, ttl)


def make_client(channel, run_id=RUN):
    """A client without its thread: tests call `exchange`. What arrives stays in `parts` if no drafter shares it."""
    client = Client(channel.connect, run_id, len(channel.groups), 0.05, clock=channel.clock)
    client.parts = []
    client.receive = client.parts.append
    return client


def tokens(*values):
    return np.array(values, dtype=np.int32)
