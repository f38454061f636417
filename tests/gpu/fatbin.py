"""Device code in a shared library: which chips it is for, and the same library with that of other chips zeroed.

A library has fatbin containers, one per source file; a container has entries: machine code (ELF) or PTX for a chip. The
CUDA runtime looks at an entry's header, then reads the data of the one that fits. Zeroed data of the others is never
read, keeps every offset, and compresses to nothing.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

MAGIC = b"\x50\xed\x55\xba"
PTX, ELF = 1, 2


class Entry(NamedTuple):
    kind: int
    chip: int  # 90 for sm_90 and sm_90a
    start: int  # of its data
    size: int


def containers(library: bytes) -> Iterator[list[Entry]]:
    """The entries of each container."""
    at = 0
    while (at := library.find(MAGIC, at)) >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", library, at)
        place, end = at + header, at + header + size
        if header != 16 or end > len(library):
            at += 4  # the same four bytes by chance
            continue
        entries = []
        while place < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", library, place)
            if kind not in (PTX, ELF) or header < 32:
                break
            entries.append(Entry(kind, struct.unpack_from("<I", library, place + 28)[0], place + header, size))
            place += header + size
        yield entries
        at = end


def needed(entries: list[Entry], chip: int) -> list[Entry]:
    """What a chip runs: its machine code, or where a container has none of it, PTX of the newest chip before it."""
    if own := [entry for entry in entries if entry.kind == ELF and entry.chip == chip]:
        return own
    older = [entry for entry in entries if entry.kind == PTX and entry.chip <= chip]
    newest = max((entry.chip for entry in older), default=0)
    return [entry for entry in older if entry.chip == newest]


def lean(library: bytes, chip: int) -> bytes:
    """The library with the data zeroed that `chip` does not need."""
    result = bytearray(library)
    for entries in containers(library):
        kept = needed(entries, chip)
        for entry in entries:
            if entry not in kept:
                result[entry.start : entry.start + entry.size] = bytes(entry.size)
    return bytes(result)
