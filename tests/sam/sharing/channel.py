"""A log in this process, behind a way to it that can fail as a test asks."""

from sam.sharing.client import Client
from sam.sharing.log import Log


class Channel:
    """What clients ask."""

    def __init__(self):
        self.log, self.asked = Log(1 << 24), 0
        self.now = 0.0  # seconds that have passed
        self.failure: Exception | None = None  # raised in place of an answer
        self.loses_answers = False  # whether the log is asked before that

    def ask(self, question):
        self.asked += 1
        answer = self.log.exchange(question) if not self.failure or self.loses_answers else None
        if self.failure:
            raise self.failure
        return answer


def make_client(channel):
    """A client without its thread: tests call `exchange`. What arrives stays in `parts` if no drafter shares it."""
    client = Client(channel.ask, clock=lambda: channel.now)
    client.parts = []
    client.receive = client.parts.append
    return client
