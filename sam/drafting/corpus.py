"""An automaton of its own for texts, to be saved, mapped into memory and drafted from."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sam.automaton import store
from sam.automaton.store import add_group
from sam.drafting import context_mixing
from sam.drafting.batch import append
from sam.drafting.token_ids import check_token_ids


@dataclass(frozen=True)
class Draft:
    """Tokens proposed to follow a sequence.

    Attributes:
        token_ids: int32 [length].
        acceptance: float32 [length], cumulative acceptance probability: that of a token and all draft tokens before it.
        match_length: tokens of the repeated suffix drafted from.
    """

    token_ids: np.ndarray
    acceptance: np.ndarray
    match_length: int


class SuffixAutomaton:
    """Several sequences in one automaton, each of which can be extended and drafted for at any time.

    Args:
        memory_budget_bytes: reserved at once, touched as the automaton grows.
        max_sequences: that may be started.
        max_draft_tokens: longest draft.
    """

    MAGIC = b"SAM\x00v001"

    def __init__(self, memory_budget_bytes: int = 1 << 30, max_sequences: int = 4096, max_draft_tokens: int = 16):
        self.store = store.make_store(memory_budget_bytes // store.BLOCK_BYTES)
        add_group(*self.store, 0)
        self._set_up(max_sequences, max_draft_tokens)

    def _set_up(self, max_sequences: int, max_draft_tokens: int) -> None:
        self.weights, self.room = context_mixing.make_weights(), context_mixing.make_room()
        # The last row is that of the texts of `add`.
        self.sequences = context_mixing.make_sequences(max_sequences + 1, max_draft_tokens)
        self.max_draft_tokens, self.read_only = max_draft_tokens, False
        self.num_sequences = 0
        self.root = int(self.store.groups[0, store.FIRST_BLOCK]) * store.BLOCK_RECORDS

    @property
    def num_tokens(self) -> int:
        return int(self.store.groups[0, store.TOKENS])

    @property
    def nbytes(self) -> int:
        return int(self.store.sizes[store.IN_USE]) * store.BLOCK_BYTES

    def start(self) -> int:
        """Begin an empty sequence; returns its number.

        Raises:
            ValueError: `max_sequences` have been started.
        """
        if self.num_sequences == len(self.sequences) - 1:
            raise ValueError(f"{self.num_sequences} sequences are the most this automaton was made for: max_sequences")
        context_mixing.start(self.sequences, self.num_sequences, 0, self.root, 0)
        self.num_sequences += 1
        return self.num_sequences - 1

    def extend(self, sequence: int, token_ids: np.ndarray) -> None:
        """Append to a sequence.

        Raises:
            ValueError: unknown sequence, negative or too large token ids, a memory budget that is spent, or an
                automaton that was loaded.
        """
        self._check(sequence)
        self._append(sequence, token_ids)

    def _append(self, row: int, token_ids: np.ndarray) -> None:
        tokens = check_token_ids(token_ids, "tokens")
        if self.read_only:
            raise ValueError("a loaded automaton cannot be extended: its memory is the file's")
        if not store.reserve(*self.store, 0, len(tokens)):
            raise ValueError(f"{len(tokens)} more tokens than memory_budget_bytes has room for after {self.num_tokens}")
        append(*self.store, self.weights, self.room, self.sequences, row, tokens, 0, len(tokens))

    def add(self, token_ids: np.ndarray) -> None:
        """Append a text of its own that nobody will extend or draft for.

        Raises:
            ValueError: as `extend`.
        """
        row = len(self.sequences) - 1
        context_mixing.start(self.sequences, row, 0, self.root, 0)
        self._append(row, token_ids)

    def thawed(self, memory_budget_bytes: int) -> SuffixAutomaton:
        """A copy of a loaded automaton that can grow to `memory_budget_bytes`."""
        copy = SuffixAutomaton(memory_budget_bytes, len(self.sequences) - 1, self.max_draft_tokens)
        for mine, its in zip(self.store, copy.store, strict=True):
            its[: len(mine)] = mine
        return copy

    def draft(self, sequence: int, budget: int, min_acceptance: float = 0.0) -> Draft:
        """Propose up to `budget` tokens, each accepted with a probability of `min_acceptance` at least."""
        self._check(sequence)
        budget = max(0, min(budget, self.max_draft_tokens))
        tokens, acceptance = np.empty(budget, np.int32), np.empty(budget, np.float32)
        records, heads, _, sizes = self.store
        learnt = (self.weights, self.room, self.sequences)
        length, match = context_mixing.draft(
            records, heads, sizes, *learnt, sequence, budget, float(min_acceptance), tokens, acceptance
        )
        return Draft(tokens[:length], acceptance[:length], int(match))

    def _check(self, sequence: int) -> None:
        if not 0 <= sequence < self.num_sequences:
            raise ValueError(f"sequence {sequence} was not started: there are {self.num_sequences}")

    def save(self, path: Path) -> None:
        """Write the automaton; `load` maps the file into memory. A complete file replaces an old one at once."""
        used = int(self.store.sizes[store.TOUCHED])
        arrays = {
            "records": self.store.records[: used * store.BLOCK_RECORDS],
            "heads": self.store.heads[: int(self.store.sizes[store.BUCKETS])],
            "groups": self.store.groups[:used],
            "sizes": self.store.sizes,
        }
        header = {"arrays": {}, "block_tokens": store.BLOCK_TOKENS}
        for name, array in arrays.items():
            header["arrays"][name] = [array.dtype.str, list(array.shape), zlib.crc32(array)]
        text = json.dumps(header).encode()
        partial = path.with_name(path.name + ".partial")
        with partial.open("wb") as file:
            file.write(self.MAGIC + len(text).to_bytes(8, "little") + text)
            for array in arrays.values():
                file.write(b"\0" * (-file.tell() % 64))
                array.tofile(file)
        partial.replace(path)

    @classmethod
    def load(cls, path: Path, max_sequences: int = 4096, max_draft_tokens: int = 16) -> SuffixAutomaton:
        """Map a saved automaton. Processes that load it share its memory; it can be drafted from, not extended.

        Raises:
            ValueError: no file, not one of `save`'s, or a damaged one.
        """
        self = cls.__new__(cls)
        self.store = _map(path)
        self._set_up(max_sequences, max_draft_tokens)
        self.read_only = True
        return self


def _map(path: Path) -> store.Store:
    damaged = f"{path}: damaged or not an automaton; build it again with python -m sam.corpus build"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; build it with python -m sam.corpus build")
    with path.open("rb") as file:
        if file.read(8) != SuffixAutomaton.MAGIC:
            raise ValueError(damaged)
        length = int.from_bytes(file.read(8), "little")
        if length > 1 << 16:
            raise ValueError(damaged)
        text = file.read(length)
    try:
        described = json.loads(text)["arrays"]
        offset, arrays = 16 + length, {}
        for name, (dtype, shape, checksum) in described.items():
            offset += -offset % 64
            # Copy on write: pages are shared between processes, and kernels see the same type as of a live store.
            arrays[name] = np.memmap(path, dtype, mode="c", offset=offset, shape=tuple(shape)).view(np.ndarray)
            offset += arrays[name].nbytes
            if zlib.crc32(arrays[name]) != checksum:
                raise ValueError(damaged)
        return store.Store(**arrays)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise ValueError(damaged) from error
