"""How a replica's drafter gets the text of samples that other replicas generate."""

from typing import Protocol

import numpy as np

from sam.drafting.token_ids import digest
from sam.sharing.drafter import SharingDrafter
from sam.sharing.log import Piece


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
        self._key, self._version = b"", 0
        drafter.share(self)

    def start(self, names: list[str], prompt: np.ndarray, policy_version: int) -> None:
        """As Inbox's."""
        self._key, self._version = digest(prompt), policy_version

    def deliver(self, names: list[str], positions: list[int], pieces: list[np.ndarray]) -> None:
        """As Inbox's."""
        samples = [(self._version, name) for name in names]  # those of another epoch have the same names
        parts = zip(samples, positions, pieces, strict=True)
        self._drafter.append_arrived([Piece(self._key, *part) for part in parts])

    def finish(self, names: list[str]) -> None:
        """As Inbox's: nothing is known of samples here."""

    def put(self, event: str, *arguments) -> None:
        """As the client's; the replay knows what its requests generate."""


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
        self._drafter.append(names, np.concatenate(pieces), np.cumsum([0, *map(len, pieces)]))

    def finish(self, names: list[str]) -> None:
        """As Inbox's."""
        for name in names:
            self._drafter.finish(name)


def inbox_of(drafter) -> Inbox:
    """The drafter's, always the same one where it shares."""
    if not isinstance(drafter, SharingDrafter):
        return MoreRequests(drafter)
    return drafter.client or SharedText(drafter)
