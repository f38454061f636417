"""The log of a run: for each prompt the text of its responses, in the order in which it came. No engine, no Ray.

A group's log is a row of int32 that only grows. A record is a stretch of a response: the client's number, the number of
the request at that client, the position of the first token in the response, the number of tokens, and the tokens. A
reader holds a cursor, the place after the last record that it has read. Positions say where text belongs: what is sent
twice is skipped by readers, and what is lost costs drafts.
"""

import math
import secrets
import struct
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from sam.drafting.texts import DIGEST_BYTES

RECORD = 4  # integers before a record's tokens
HEAD = struct.Struct("=4i")  # these
MAX_INTEGERS = 1 << 17  # of one message in either direction; the rest follows with the next
PIECE_TOKENS = 256  # of a record at most
# Bytes of a group besides its integers, as tests/sam/sharing/test_log.py measures; arrays over-allocate by an eighth.
GROUP_BYTES = 700
GROWTH = 1.125

STRETCH = struct.Struct(f"<{DIGEST_BYTES}sqi")  # of a message: group, cursor, and the bytes of the records that follow
IDENTITY = struct.Struct("<q")  # at the head of an answer
NOTHING_WANTED = -1  # in place of a cursor


class Piece(NamedTuple):
    """A stretch of a response that is written elsewhere."""

    key: bytes  # of its group: the prompt's digest
    name: Hashable  # of the response, among those of its group
    position: int  # of the first token in the response
    tokens: np.ndarray  # int32 [length]


def pack(stretches: Iterable[tuple[bytes, int, bytes]]) -> bytes:
    """The bytes of a message's (group, cursor, records)."""
    return b"".join(STRETCH.pack(key, cursor, len(records)) + records for key, cursor, records in stretches)


def unpack(packed: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    """What `pack` was given."""
    at = 0
    while at < len(packed):
        key, cursor, size = STRETCH.unpack_from(packed, at)
        at += STRETCH.size + size
        yield key, cursor, packed[at - size : at]


def records_of(client: int, request: int, position: int, tokens: array) -> bytes:
    """Tokens of a response from `position` on, as records."""
    records = array("i")
    for begin in range(0, len(tokens), PIECE_TOKENS):
        piece = tokens[begin : begin + PIECE_TOKENS]
        records.extend((client, request, position + begin, len(piece), *piece))
    return records.tobytes()


def read_records(records: bytes) -> Iterator[tuple[int, int, int, np.ndarray, int]]:
    """Client, request, position and tokens of each whole record, and the place after it."""
    integers = np.frombuffer(records, np.int32)
    at = 0
    while at + RECORD <= len(integers):
        client, request, position, count = HEAD.unpack_from(records, at * integers.itemsize)
        begin = at + RECORD
        at = begin + count
        if count <= 0 or at > len(integers):
            return
        yield client, request, position, integers[begin:at], at


def most_bytes(groups: int, responses: int, tokens: int) -> int:
    """Bytes that as many groups of as many responses of `tokens` each take at most: with a record for each token."""
    text = responses * tokens * (RECORD + 1) * np.dtype(np.int32).itemsize
    return math.ceil(groups * (GROUP_BYTES + GROWTH * text))


class GroupLog:
    """The log of a prompt's responses. `base` is the cursor of its begin, which no other log has and none before it."""

    def __init__(self) -> None:
        self.base = secrets.randbits(62)
        self.integers = array("i")

    @property
    def nbytes(self) -> int:
        """Bytes that the group takes at most."""
        return int(GROUP_BYTES + GROWTH * self.integers.itemsize * len(self.integers))


class Log:
    """The logs of all groups, within a budget; the recipe runs it as an actor of Ray, which starts it anew if it dies.

    Args:
        budget_bytes: of all groups. Beyond it those leave first that were asked for or appended to longest ago.
    """

    def __init__(self, budget_bytes: int):
        self.budget_bytes = budget_bytes
        self.nbytes = 0
        self.identity = secrets.randbits(62)
        self._groups: OrderedDict[bytes, GroupLog] = OrderedDict()  # the one touched longest ago first

    def exchange(self, question: bytes) -> bytes:
        """Take a client's new text, and give it what follows its cursors; its own is among that."""
        answers = []
        left = MAX_INTEGERS
        for key, cursor, records in unpack(question):
            before = self._groups[key].nbytes if key in self._groups else 0
            group = self._groups.setdefault(key, GroupLog())
            self._groups.move_to_end(key)
            group.integers.frombytes(records)
            self.nbytes += group.nbytes - before
            if cursor != NOTHING_WANTED:
                # A cursor outside the log is of one that has been forgotten since.
                begin = cursor - group.base if 0 <= cursor - group.base <= len(group.integers) else 0
                part = group.integers[begin : begin + left]
                left -= len(part)
                answers.append((key, group.base + begin, part.tobytes()))
        while self.nbytes > self.budget_bytes:
            self.nbytes -= self._groups.popitem(last=False)[1].nbytes
        return IDENTITY.pack(self.identity) + pack(answers)
