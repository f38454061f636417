"""What a client and a shard say to each other: flat arrays of tokens, positions and sequence numbers, and no time."""

from typing import NamedTuple

import numpy as np

from sam.drafting.token_ids import DIGEST_BYTES

KEY_BYTES = DIGEST_BYTES  # of a group: its prompt's digest
MAX_TOKENS = 1 << 16  # of one message in either direction; the rest follows with the next


def shard_of(key: bytes, shards: int) -> int:
    """The shard, 0 to `shards` - 1, that keeps a group."""
    return int.from_bytes(key[:8], "big") % shards


class WrongRunError(ValueError):
    """A client asked a shard of another run."""


class Message(NamedTuple):
    """New text of a client's requests, and the groups of which it wants the other clients' text.

    A piece is a stretch of a response; there is at most one of each request.

    Attributes:
        run_id: of the client's run; a shard of another one refuses.
        client: the client's number, drawn at random when it starts.
        keys: bytes [groups * KEY_BYTES], the groups named.
        since: int64 [groups], the client's cursor in each group's log; -1: it wants nothing of that group.
        known: int32 [groups], members of each group whose names the client has.
        groups: int32 [pieces], index into `keys`.
        requests: int32 [pieces], the request's number at its client.
        versions: int32 [pieces], of the weights that write the response.
        positions: int32 [pieces], place of a piece's first token in its response.
        offsets: int64 [pieces + 1], where each piece's tokens begin, and the total.
        tokens: int32 [total].
    """

    run_id: str
    client: int
    keys: bytes
    since: np.ndarray
    known: np.ndarray
    groups: np.ndarray
    requests: np.ndarray
    versions: np.ndarray
    positions: np.ndarray
    offsets: np.ndarray
    tokens: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays and keys."""
        return len(self.keys) + sum(part.nbytes for part in self if isinstance(part, np.ndarray))


class Reply(NamedTuple):
    """What the shard has of the message's pieces, and the other clients' text since the message's cursors.

    The shard numbers a group's responses, its members, in the order in which they begin: a name travels once, so that a
    client looks up an array for each piece and not a dictionary.

    Attributes:
        incarnation: of the shard's memory; another one than before: it has restarted and forgotten all.
        have: int32 [pieces of the message], tokens that the shard has of each piece's request.
        is_full: no memory was free for a piece.
        evicted: groups evicted from the shard's memory since it started.
        bases: int64 [groups of the message], number of the first entry of each group's log, -1 for a group that the
            shard does not have; another one than before: it was dropped in between.
        ends: int64 [groups of the message], the cursor to ask from next.
        named: int32 [groups of the message], members of each group that are named here, from the message's `known` on.
        names: int32 [members named, 2], client and request.
        groups: int32 [pieces], index into the message's keys; rising.
        members: int32 [pieces], whose text it is, by its number in the group.
        positions: int32 [pieces], place of a piece's first token in its response.
        offsets: int64 [pieces + 1], where each piece's tokens begin, and the total.
        tokens: int32 [total].
    """

    incarnation: int
    have: np.ndarray
    is_full: bool
    evicted: int
    bases: np.ndarray
    ends: np.ndarray
    named: np.ndarray
    names: np.ndarray
    groups: np.ndarray
    members: np.ndarray
    positions: np.ndarray
    offsets: np.ndarray
    tokens: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return sum(part.nbytes for part in self if isinstance(part, np.ndarray))


def nothing(run_id: str) -> Message:
    """A message that names no group and holds no text."""
    wide, narrow = np.zeros(0, np.int64), np.zeros(0, np.int32)
    return Message(run_id, 0, b"", wide, *[narrow] * 5, np.zeros(1, np.int64), narrow)


def check(reply: Reply) -> None:
    """Raise ValueError unless a reply's arrays fit each other and hold tokens."""
    if reply.tokens.size and int(reply.tokens.min()) < 0:
        raise ValueError(f"token {int(reply.tokens.min())} in a reply: expected 0 or more")
    if len(reply.names) != reply.named.sum():
        raise ValueError(f"{len(reply.names)} names in a reply: expected {reply.named.sum()}")
    if len(reply.offsets) != len(reply.groups) + 1 or int(reply.offsets[-1]) != len(reply.tokens):
        raise ValueError(f"{len(reply.offsets)} offsets up to {int(reply.offsets[-1])} for {len(reply.tokens)} tokens")


def offsets_of(counts) -> np.ndarray:
    """int64 [n + 1], where stretches of these lengths begin, one after the other, and the total."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets
