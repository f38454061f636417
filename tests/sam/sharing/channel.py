"""A log in this process, behind a way to it that can fail as a test asks."""

import numpy as np

from sam.sharing.client import Client
from sam.sharing.log import Log

BUDGET = 1 << 24


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Channel:
    """What clients ask.

    Attributes:
        failure: raised in place of an answer.
        loses_answers: whether the log is asked before that.
        asked: questions.
    """

    def __init__(self):
        self.log, self.clock = Log(BUDGET), Clock()
        self.failure: Exception | None = None
        self.loses_answers, self.asked = False, 0

    def ask(self, question):
        self.asked += 1
        answer = self.log.exchange(question) if not self.failure or self.loses_answers else None
        if self.failure:
            raise self.failure
        return answer


def make_client(channel):
    """A client without its thread: tests call `exchange`. What arrives stays in `parts` if no drafter shares it."""
    client = Client(channel.ask, clock=channel.clock)
    client.parts = []
    client.receive = client.parts.append
    return client


def tokens(*values):
    return np.array(values, dtype=np.int32)
