"""What a history knows of some prompts, from the files of all machines."""

import itertools
import sqlite3
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sam.drafting.token_ids import digest
from sam.history.database import EmptyFile, files, open_to_read, unusable


class Row(NamedTuple):
    """A response as the file has it."""

    id: int
    version: int
    digest: bytes
    blob: bytes

    def response(self) -> np.ndarray | None:
        """int32 [length], its tokens; None if the row is damaged: SQLite itself does not look."""
        if not isinstance(self.blob, bytes) or type(self.version) is not int or len(self.blob) % 4:
            return None
        tokens = np.frombuffer(self.blob, np.int32).copy()
        return tokens if digest(tokens) == self.digest else None


class Texts(NamedTuple):
    """Responses to some prompts, those of older weights first.

    Attributes:
        prompts: int64 [responses], the index of each one's prompt in the question.
        offsets: int64 [responses + 1], where each begins, and the total.
        tokens: int32 [total].
    """

    prompts: np.ndarray
    offsets: np.ndarray
    tokens: np.ndarray


def read(connection: sqlite3.Connection, prompt: bytes, after: int = 0, but_writer: int | None = None) -> list[Row]:
    """A prompt's responses with an id above `after`, not of the process `but_writer`."""
    rows = connection.execute(
        "SELECT id, version, digest, tokens FROM responses WHERE prompt = ? AND id > ? AND writer IS NOT ?",
        (prompt, after, but_writer),
    )
    return list(itertools.starmap(Row, rows))


def load(path: Path, prompts: Sequence[np.ndarray], fingerprint: dict[str, str] | None = None) -> Texts:
    """The responses to some prompts, of all files of a history, without damaged ones.

    Args:
        path: a folder, or one file.
        prompts: int32 [length], each.
        fingerprint: as `sam.history.fingerprint` gives it; None: any.

    Raises:
        HistoryError: a file cannot be read, is damaged, or is of another tokenizer or model.
    """
    found: list[list[Row]] = [[] for _ in prompts]
    for file in files(path):
        with suppress(EmptyFile), closing(open_to_read(file, fingerprint)) as connection:
            try:
                for rows, prompt in zip(found, prompts, strict=True):
                    rows += read(connection, digest(prompt))
            except sqlite3.Error as error:
                raise unusable(file, error) from error
    texts = []
    for index, rows in enumerate(found):
        whole = [(row.version, tokens) for row in rows if (tokens := row.response()) is not None]
        texts += [(index, tokens) for _, tokens in sorted(whole, key=lambda one: one[0])]
    offsets = np.cumsum([0, *(len(tokens) for _, tokens in texts)])
    tokens = np.concatenate([np.zeros(0, np.int32), *(tokens for _, tokens in texts)])
    return Texts(np.array([index for index, _ in texts], np.int64), offsets, tokens)
