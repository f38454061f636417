"""The file of a history: SQLite in WAL mode, one for each machine, which all engine processes of the machine write to.

SQLite since Python brings it, and since it has what a file of our own would need: transactions that a killed process
leaves whole, readers that never wait for writers, several writing processes, a bound on damage when the disk is full.

The WAL needs memory that is shared by all who use the file, so processes of several machines cannot share one. A folder
holds a file for each machine; whoever reads merges them.
"""

import os
import re
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

import numpy as np

from sam.drafting.token_ids import digest

SUFFIX = ".sqlite"
BUSY_SECONDS = 30.0  # to wait for another process's transaction
FORMAT = 2
SCHEMA = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value)",
    """CREATE TABLE responses (
    id INTEGER PRIMARY KEY,
    prompt BLOB NOT NULL,      -- blake2b of the prompt's tokens
    digest BLOB NOT NULL,      -- blake2b of the response's: a repeated step adds nothing
    version INTEGER NOT NULL,  -- weight syncs up to the response, over all runs
    writer INTEGER NOT NULL,   -- the process
    num_tokens INTEGER NOT NULL,
    tokens BLOB NOT NULL,      -- int32
    UNIQUE (prompt, digest)
)""",
    "CREATE INDEX by_version ON responses (version, id, num_tokens)",
    f"PRAGMA user_version = {FORMAT}",
)
ADD = (
    "INSERT INTO responses (prompt, digest, version, writer, num_tokens, tokens) VALUES (?, ?, ?, ?, ?, ?) "
    "ON CONFLICT (prompt, digest) DO UPDATE SET version = excluded.version"
)
DROP_EPOCHS = (
    "DELETE FROM responses WHERE prompt = ?1 AND version < (SELECT min(version) FROM "
    "(SELECT DISTINCT version FROM responses WHERE prompt = ?1 ORDER BY version DESC LIMIT ?2))"
)
OLDEST = "SELECT id, num_tokens FROM responses ORDER BY version, id"
FINGERPRINT = ("tokenizer", "model")
T = TypeVar("T")


class HistoryError(ValueError):
    """A history cannot be used; one line says why and what to do."""


def own_file(folder: Path) -> Path:
    """This machine's file in the folder of a history."""
    return folder / (re.sub(r"[^\w.-]", "_", socket.gethostname()) + SUFFIX)


def read_files(
    folder: Path,
    fingerprint: dict[str, str] | None,
    read: Callable[[Path, sqlite3.Connection], T],
    failed: Callable[[Exception], None],
) -> list[T]:
    """What `read` returns for each file of a history; of those that cannot be read `failed` is told."""
    found = []
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            with closing(open_to_read(file, fingerprint)) as connection:
                found.append(read(file, connection))
        except (HistoryError, sqlite3.Error) as error:
            failed(error)
    return found


def check_folder(folder: Path, fingerprint: dict[str, str] | None) -> None:
    """Raise HistoryError unless a run of this tokenizer and model could write to `folder`; makes nothing."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise unusable(folder, OSError(f"{existing} is no folder that can be written"))
    for file in folder.glob(f"*{SUFFIX}"):
        open_to_read(file, fingerprint).close()


def open_to_write(file: Path, fingerprint: dict[str, str]) -> sqlite3.Connection:
    """Open a machine's file, a new one if need be.

    Raises:
        HistoryError: it cannot be written, is damaged, or is of another tokenizer or model.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unusable(file, error) from error
    with _opened(file, "rwc") as connection:
        _switch_to_wal(connection)
        connection.execute("PRAGMA synchronous = NORMAL")  # a power cut may cost the last rows, and damages nothing
        connection.execute("PRAGMA journal_size_limit = 67108864")
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            if _is_empty(connection):
                _make_tables(connection, fingerprint)
            _check(connection, file, fingerprint)
    return connection


def open_to_read(file: Path, fingerprint: dict[str, str] | None = None) -> sqlite3.Connection:
    """Open a file; another machine's, which may be written there, as far as it is in the file itself.

    Raises:
        HistoryError: it cannot be read, is damaged, or is of another tokenizer or model than `fingerprint`.
    """
    is_own = file.absolute() == own_file(file.absolute().parent)
    with _opened(file, "rw" if is_own else "ro&immutable=1") as connection:
        connection.execute("PRAGMA query_only = 1")
        if not _is_empty(connection):
            _check(connection, file, fingerprint)
            return connection
    connection.close()  # another process is making the file
    nothing_yet = sqlite3.connect(":memory:")
    _make_tables(nothing_yet, fingerprint or {})
    return nothing_yet


@contextmanager
def _opened(file: Path, mode: str) -> Iterator[sqlite3.Connection]:
    """A connection that stays open unless the block raises, HistoryError in place of SQLite's errors."""
    connection = None
    try:
        name = f"{file.absolute().as_uri()}?mode={mode}"
        connection = sqlite3.connect(name, timeout=BUSY_SECONDS, isolation_level=None, uri=True)
        yield connection
    except (HistoryError, sqlite3.Error) as error:
        if connection is not None:
            connection.close()
        raise error if isinstance(error, HistoryError) else unusable(file, error) from error


def _switch_to_wal(connection: sqlite3.Connection) -> None:
    """SQLite does not wait for the other processes here, as it does everywhere else."""
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _is_empty(connection: sqlite3.Connection) -> bool:
    return connection.execute("PRAGMA user_version").fetchone() == (0,)


def _make_tables(connection: sqlite3.Connection, fingerprint: dict[str, str]) -> None:
    for statement in SCHEMA:
        connection.execute(statement)
    connection.executemany("INSERT INTO meta VALUES (?, ?)", fingerprint.items())


def _check(connection: sqlite3.Connection, file: Path, fingerprint: dict[str, str] | None) -> None:
    """Raise HistoryError unless the file has this format, and was written with this tokenizer and model."""
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    if found != FORMAT:
        raise HistoryError(f"{file}: a history of format {found}, expected {FORMAT}: remove it, or name a new folder")
    written = dict(connection.execute("SELECT key, value FROM meta"))
    for key in FINGERPRINT if fingerprint else ():
        if written.get(key) != fingerprint[key]:
            raise HistoryError(
                f"{file}: a history of {key} {written.get(key)}, this run has {fingerprint[key]}: "
                "choose another speculation.history_path, or remove it"
            )


def unusable(file: Path, error: Exception) -> HistoryError:
    """The line for what SQLite or the file system says."""
    return HistoryError(f"{file}: {error}: name a folder that can be written, or remove the file if it is damaged")


def add(
    connection: sqlite3.Connection,
    responses: Sequence[tuple[bytes, int, np.ndarray]],
    writer: int,
    tokens: int,
    epochs: int,
) -> None:
    """Add responses and keep the bounds, all or nothing.

    Args:
        responses: the prompt's digest, the version of the weights that wrote it, and int32 [length] tokens, each.
        writer: the number of this process.
        tokens: that the file may hold; those of the oldest weights go first.
        epochs: versions of the weights of which a prompt's responses are kept, the newest ones.
    """
    rows = [(prompt, digest(text), version, writer, len(text), text.tobytes()) for prompt, version, text in responses]
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(ADD, rows)
        connection.executemany(DROP_EPOCHS, {(prompt, epochs) for prompt, *_ in responses})
        beyond = connection.execute("SELECT coalesce(sum(num_tokens), 0) FROM responses").fetchone()[0] - tokens
        oldest, dropped = connection.execute(OLDEST), []
        while beyond > 0 and (row := oldest.fetchone()):
            dropped.append(row[:1])
            beyond -= row[1]
        oldest.close()
        connection.executemany("DELETE FROM responses WHERE id = ?", dropped)


def read(
    connection: sqlite3.Connection, prompt: bytes, after: int = 0, but_writer: int | None = None
) -> Iterator[tuple[int, int, np.ndarray | None]]:
    """A prompt's responses with an id above `after`, not of the process `but_writer`.

    Yields:
        id, version, and int32 [length] tokens; None for a damaged row, since SQLite itself does not look.
    """
    rows = connection.execute(
        "SELECT id, CAST(version AS INTEGER), digest, CAST(tokens AS BLOB) FROM responses "
        "WHERE prompt = ? AND id > ? AND writer IS NOT ?",
        (prompt, after, but_writer),
    )
    for number, version, known, blob in rows:
        tokens = np.frombuffer(blob[: len(blob) // 4 * 4], np.int32).copy()
        yield number, version, tokens if digest(tokens) == known else None
