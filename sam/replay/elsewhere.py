"""How a replica's drafter gets the text of samples that other replicas generate."""

from typing import Protocol

import numpy as np

from sam.drafting.token_ids import digest
from sam.sharing.arrivals import Arrivals, split
from sam.sharing.client import PART_TOKENS
from sam.sharing.drafter import SharingDrafter
from sam.sharing.messages import offsets_of


class Inbox(Protocol):
    """Where a drafter's text from elsewhere arrives. Samples are named as the replay's requests are."""

    def start(self, names: list[str], prompt: np.ndarray, policy_version: int) -> None:
        """Samples of a prompt (int32 [length]) begin elsewhere."""

    def deliver(self, names: list[str], positions: list[int], pieces: list[np.ndarray]) -> None:
        """Tokens of samples, int32 [length] each, from a position of their responses on."""

    def finish(self, names: list[str]) -> None:
        """Samples have ended, and all of their text has been delivered."""


class SharedText:
    """In the place of a sharing drafter's client: text arrives when the replay says so.

    From there on it takes the same way as in an engine. Of prompts without a sample of its own a replica gets nothing,
    as in an engine.
    """

    def __init__(self, drafter: SharingDrafter):
        self.counters: dict[str, float] = {}
        self._drafter = drafter
        self._numbers: dict[str, int] = {}  # of samples whose text has begun to arrive
        self._key, self._started = b"", 0
        drafter.share(self)

    def start(self, names: list[str], prompt: np.ndarray, policy_version: int) -> None:
        """As Inbox's."""
        self._key = digest(prompt)

    def deliver(self, names: list[str], positions: list[int], pieces: list[np.ndarray]) -> None:
        """As Inbox's."""
        new = []
        for name in names:
            if name not in self._numbers:
                self._numbers[name], self._started = self._started, self._started + 1
                new.append((self._numbers[name], self._key))
        numbers = np.array([self._numbers[name] for name in names], np.int64)
        counts = np.array([len(piece) for piece in pieces], np.int64)
        arrivals = Arrivals(new, numbers, np.array(positions, np.int64), offsets_of(counts), np.concatenate(pieces))
        for part in split(arrivals, PART_TOKENS):
            self._drafter.append_arrived(part)

    def finish(self, names: list[str]) -> None:
        """As Inbox's."""
        for name in names:
            self._numbers.pop(name, None)

    def put(self, event: str, *arguments) -> None:
        """As the client's; the replay knows what its requests generate."""

    def now(self) -> float:
        """As the client's; a replay has no clock."""
        return 0.0


class MoreRequests:
    """For baselines, which share nothing: a sample elsewhere is one more request."""

    def __init__(self, drafter):
        self._drafter = drafter

    def start(self, names: list[str], prompt: np.ndarray, policy_version: int) -> None:
        """As Inbox's."""
        for name in names:
            self._drafter.start(name, prompt, policy_version)

    def deliver(self, names: list[str], positions: list[int], pieces: list[np.ndarray]) -> None:
        """As Inbox's."""
        self._drafter.append(names, np.concatenate(pieces), offsets_of(np.array([len(piece) for piece in pieces])))

    def finish(self, names: list[str]) -> None:
        """As Inbox's."""
        for name in names:
            self._drafter.finish(name)


def inbox_of(drafter) -> Inbox:
    """The drafter's, always the same one where it shares."""
    if not isinstance(drafter, SharingDrafter):
        return MoreRequests(drafter)
    return drafter.client or SharedText(drafter)
