"""The file of a history: SQLite in WAL mode, one for each machine, which all engine processes of the machine write to.

SQLite since Python brings it, and since it has what a file of our own would need: transactions that a killed process
leaves whole, readers that never wait for writers, several writing processes, a bound on damage when the disk is full.
LMDB reads faster, and would be a dependency; a prompt is read once a round, by a thread that nobody waits for.

The WAL needs memory that is shared by all who use the file, so processes of several machines cannot share one. A folder
holds a file for each machine; whoever reads merges them.
"""

import os
import re
import socket
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sam.drafting.token_ids import digest

SUFFIX = ".sqlite"
BUSY_SECONDS = 30.0  # to wait for another process's transaction
FORMAT = 1
SCHEMA = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE responses (
    id INTEGER PRIMARY KEY,
    prompt BLOB NOT NULL,      -- blake2b of the prompt's tokens
    digest BLOB NOT NULL,      -- blake2b of the response's: a repeated step adds nothing
    version INTEGER NOT NULL,  -- weight syncs up to the response, over all runs
    writer INTEGER NOT NULL,   -- the process
    num_tokens INTEGER NOT NULL,
    tokens BLOB NOT NULL,      -- int32
    UNIQUE (prompt, digest)
);
CREATE INDEX by_version ON responses (version);
INSERT INTO meta VALUES ('tokens', 0);
CREATE TRIGGER added AFTER INSERT ON responses BEGIN
    UPDATE meta SET value = value + new.num_tokens WHERE key = 'tokens';
END;
CREATE TRIGGER removed AFTER DELETE ON responses BEGIN
    UPDATE meta SET value = value - old.num_tokens WHERE key = 'tokens';
END;
PRAGMA user_version = {FORMAT};
"""
FINGERPRINT = ("tokenizer", "model")


class HistoryError(ValueError):
    """A history cannot be used; one line says why and what to do."""


class EmptyFile(HistoryError):
    """Another process is making the file: there is nothing in it yet."""


class Response(NamedTuple):
    """A row to add: the prompt's key, the version that wrote it, and int32 [length] tokens."""

    prompt: bytes
    version: int
    tokens: np.ndarray


def own_file(folder: Path) -> Path:
    """This machine's file in the folder of a history."""
    return folder / (re.sub(r"[^\w.-]", "_", socket.gethostname()) + SUFFIX)


def files(path: Path) -> list[Path]:
    """The files of a history: `path` itself, or those in the folder `path`."""
    return [path] if path.is_file() else sorted(path.glob(f"*{SUFFIX}"))


def check_folder(folder: Path, fingerprint: dict[str, str] | None) -> None:
    """Raise HistoryError unless a run of this tokenizer and model could write to `folder`; makes nothing."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise unusable(folder, OSError(f"{existing} is no folder that can be written"))
    for file in files(folder):
        with suppress(EmptyFile):
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
        with transaction(connection):
            if connection.execute("PRAGMA user_version").fetchone() == (0,):
                for statement in _statements(SCHEMA):
                    connection.execute(statement)
                connection.executemany("INSERT INTO meta VALUES (?, ?)", fingerprint.items())
            check(connection, file, fingerprint)
    return connection


def open_existing(file: Path) -> sqlite3.Connection:
    """Open a file of any tokenizer and model, to write.

    Raises:
        HistoryError: it cannot be written, or is damaged.
    """
    with _opened(file, "rw") as connection:
        check(connection, file, None)
    return connection


def open_to_read(file: Path, fingerprint: dict[str, str] | None = None) -> sqlite3.Connection:
    """Open a file; another machine's, which may be written there, as far as it is in the file itself.

    Raises:
        HistoryError: it cannot be read, is damaged, or is of another tokenizer or model than `fingerprint`.
    """
    is_own = file.absolute() == own_file(file.absolute().parent)
    with _opened(file, "rw" if is_own else "ro&immutable=1") as connection:
        connection.execute("PRAGMA query_only = 1")
        check(connection, file, fingerprint)
    return connection


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


def _statements(script: str) -> Iterable[str]:
    """Of a script; sqlite3's own executescript commits first, and two processes would both make the tables."""
    statement = ""
    for line in script.splitlines():
        statement += line + "\n"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


def check(connection: sqlite3.Connection, file: Path, fingerprint: dict[str, str] | None) -> None:
    """Raise HistoryError unless the file has this format, and was written with this tokenizer and model."""
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    if found == 0:
        raise EmptyFile(f"{file}: nothing is in it yet: wait, or remove it")
    if found != FORMAT:
        raise HistoryError(f"{file}: a history of format {found}, expected {FORMAT}: remove it, or name a new folder")
    if fingerprint is None:
        return
    written = dict(connection.execute("SELECT key, value FROM meta"))
    for key in FINGERPRINT:
        if written.get(key) != fingerprint[key]:
            raise HistoryError(
                f"{file}: a history of {key} {written.get(key)}, this run has {fingerprint[key]}: "
                "choose another speculation.history_path, or remove it"
            )


def unusable(file: Path, error: Exception) -> HistoryError:
    """The line for what SQLite or the file system says."""
    return HistoryError(f"{file}: {error}: name a folder that can be written, or remove the file if it is damaged")


@contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All of a block's statements or, where it raises, none."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # some errors, such as a full disk, end it themselves
            connection.execute("ROLLBACK")
        raise


def add(connection: sqlite3.Connection, responses: Sequence[Response], writer: int, tokens: int, epochs: int) -> None:
    """Add responses and keep the bounds, all or nothing.

    Args:
        writer: the number of this process.
        tokens: that the file may hold; those of the oldest weights go first.
        epochs: versions of the weights of which a prompt's responses are kept, the newest ones.
    """
    rows = [(r.prompt, digest(r.tokens), r.version, writer, len(r.tokens), r.tokens.tobytes()) for r in responses]
    with transaction(connection):
        connection.executemany(
            "INSERT INTO responses (prompt, digest, version, writer, num_tokens, tokens) VALUES (?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (prompt, digest) DO UPDATE SET version = excluded.version",
            rows,
        )
        prune(connection, tokens, epochs, {r.prompt for r in responses})


def prune(connection: sqlite3.Connection, tokens: int, epochs: int, prompts: Iterable[bytes] | None = None) -> int:
    """Remove what is beyond the bounds, inside a transaction; returns the number of responses removed.

    Args:
        tokens, epochs: as for `add`.
        prompts: whose epochs are counted; None: all.
    """
    if prompts is None:
        prompts = [prompt for (prompt,) in connection.execute("SELECT DISTINCT prompt FROM responses")]
    outdated = connection.executemany(
        "DELETE FROM responses WHERE prompt = ?1 AND version < (SELECT min(version) FROM "
        "(SELECT DISTINCT version FROM responses WHERE prompt = ?1 ORDER BY version DESC LIMIT ?2))",
        [(prompt, epochs) for prompt in prompts],
    )
    beyond = num_tokens(connection) - tokens
    oldest = connection.execute("SELECT id, num_tokens FROM responses ORDER BY version, id")
    doomed = []
    while beyond > 0 and (row := oldest.fetchone()):
        identity, length = row
        doomed.append((identity,))
        beyond -= length
    oldest.close()
    connection.executemany("DELETE FROM responses WHERE id = ?", doomed)
    return max(0, outdated.rowcount) + len(doomed)


def num_tokens(connection: sqlite3.Connection) -> int:
    """Tokens of all responses, as triggers count them.

    Raises:
        sqlite3.DatabaseError: there is no such count.
    """
    row = connection.execute("SELECT value FROM meta WHERE key = 'tokens'").fetchone()
    if row is None or type(row[0]) is not int:
        raise sqlite3.DatabaseError(f"the count of tokens is {row and row[0]!r}, expected a number")
    return row[0]


def newest_version(connection: sqlite3.Connection) -> int:
    """Of the weights that wrote a response; 0 where there is none."""
    return connection.execute("SELECT coalesce(max(version), 0) FROM responses").fetchone()[0]
