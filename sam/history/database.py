"""The file of a history: SQLite, one for each machine, which all engine processes of the machine read and write.

Its transactions are left whole by a killed process and a full disk. Its locks are not to be relied on between machines:
a folder holds a file for each, and whoever reads merges them.
"""

import hashlib
import logging
import socket
import sqlite3
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sam.drafting.texts import digest

logger = logging.getLogger(__name__)

SUFFIX = ".sqlite"
BUSY_SECONDS = 30.0  # to wait for another process's transaction
SCHEMA = (
    "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value)",
    """CREATE TABLE IF NOT EXISTS responses (
    id INTEGER PRIMARY KEY,
    prompt BLOB NOT NULL,      -- sam.drafting.texts.digest
    digest BLOB NOT NULL,      -- of the response: a repeated step adds nothing
    version INTEGER NOT NULL,  -- weight syncs up to the response, over all runs
    num_tokens INTEGER NOT NULL,
    tokens BLOB NOT NULL,      -- int32
    UNIQUE (prompt, digest)
)""",
    "CREATE INDEX IF NOT EXISTS by_version ON responses (version, id, num_tokens)",
)
ADD = (
    "INSERT INTO responses (prompt, digest, version, num_tokens, tokens) VALUES (?, ?, ?, ?, ?) "
    "ON CONFLICT (prompt, digest) DO UPDATE SET version = excluded.version"
)
DROP_EPOCHS = (
    "DELETE FROM responses WHERE prompt = ?1 AND version < (SELECT min(version) FROM "
    "(SELECT DISTINCT version FROM responses WHERE prompt = ?1 ORDER BY version DESC LIMIT ?2))"
)
DROP_OLDEST = (
    "DELETE FROM responses WHERE id IN (SELECT id FROM (SELECT id, sum(num_tokens) OVER "
    "(ORDER BY version DESC, id DESC) AS held FROM responses) WHERE held > ?)"
)
# SQLite keeps whatever a damaged or foreign file has in a column of numbers: text is above any of them.
LENGTHS = (
    "SELECT hex(prompt), version, num_tokens FROM responses WHERE version >= ? AND num_tokens > 0 "
    "AND typeof(version) = 'integer' AND typeof(num_tokens) = 'integer'"
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "vocab.txt")


class KeptResponse(NamedTuple):
    """A response that a file holds."""

    version: int  # of the weights
    digest: bytes
    tokens: np.ndarray | None  # int32 [length]; None: they are damaged


def own_file(folder: Path) -> Path:
    """This machine's file in the folder of a history."""
    return folder / f"{socket.gethostname()}{SUFFIX}"


def fingerprint(model: str) -> str:
    """What tells what a token id of `model` means: a hash of the tokenizer's files in its folder, or its name."""
    folder = Path(model)
    if not folder.is_dir():
        return model
    files = [folder / name for name in TOKENIZER_FILES]
    content = b"".join(file.read_bytes() for file in files if file.is_file())
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def open_file(file: Path, tokenizer: str | None, to_write: bool = False) -> sqlite3.Connection:
    """Open a file, to write a new one if need be.

    Raises:
        ValueError: it cannot be opened, is damaged, or is of another than `tokenizer` (None: of any).
    """
    if to_write:
        mode = "rwc"
    elif file.name == own_file(file.parent).name:
        mode = "rw"
    else:  # what another machine may be writing is read as far as it goes
        mode = "ro&immutable=1"
    connection = None
    try:
        if to_write:
            file.parent.mkdir(parents=True, exist_ok=True)
        uri = f"{file.absolute().as_uri()}?mode={mode}"
        connection = sqlite3.connect(uri, timeout=BUSY_SECONDS, isolation_level=None, uri=True)
        with connection:
            if to_write:
                connection.execute("BEGIN IMMEDIATE")
                for statement in SCHEMA:
                    connection.execute(statement)
                connection.execute("INSERT OR IGNORE INTO meta VALUES ('tokenizer', ?)", (tokenizer,))
            (kept,) = connection.execute("SELECT max(value) FROM meta WHERE key = 'tokenizer'").fetchone()
    except (sqlite3.Error, OSError) as error:
        if connection is not None:
            connection.close()
        remedy = "name a folder that can be written, or remove the file if it is damaged"
        raise ValueError(f"{file}: {error}: {remedy}") from error
    if tokenizer not in (None, kept):
        connection.close()
        remedy = "choose another speculation.history_path, or remove it"
        raise ValueError(f"{file}: a history of tokenizer {kept}, this run has {tokenizer}: {remedy}")
    return connection


def read_files(folder: Path, tokenizer: str | None, read: Callable, failed: Callable) -> None:
    """Call `read` with a connection to each file of a history; `failed` is told why one cannot be read."""
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            if file.stat().st_size:  # or another process is making it
                with closing(open_file(file, tokenizer)) as connection:
                    read(connection)
        except (ValueError, sqlite3.Error) as error:
            failed(error)


def add(connection, responses: Sequence[tuple[bytes, int, np.ndarray]], tokens: int, epochs: int) -> None:
    """Add responses (the prompt's digest, the version of the weights, int32 [length] tokens), and keep of a prompt the
    newest `epochs` versions', and of all the newest `tokens` tokens."""
    rows = [(prompt, digest(text), version, len(text), text.tobytes()) for prompt, version, text in responses]
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(ADD, rows)
        connection.executemany(DROP_EPOCHS, {(prompt, epochs) for prompt, *_ in responses})
        if connection.execute("SELECT total(num_tokens) FROM responses").fetchone()[0] > tokens:
            connection.execute(DROP_OLDEST, (tokens,))


def read(connection: sqlite3.Connection, prompt: bytes) -> Iterator[KeptResponse]:
    """The responses to a prompt; SQLite does not look whether what it has is damaged."""
    query = "SELECT CAST(version AS INTEGER), digest, CAST(tokens AS BLOB) FROM responses WHERE prompt = ?"
    for version, kept_digest, blob in connection.execute(query, (prompt,)):
        tokens = np.frombuffer(blob[: len(blob) // 4 * 4], np.int32).copy()
        yield KeptResponse(version, kept_digest, tokens if digest(tokens) == kept_digest else None)


class ResponseLengths:
    """How long responses to each prompt were: the geometric mean of the newest weights'. Threads may ask meanwhile."""

    def __init__(self, folder: Path):
        self.errors = 0
        self._folder = folder
        self._newest = 0  # version of the weights
        self._known: dict[str, tuple[int, float]] = {}  # by prompt: the version of the weights, tokens

    def expected(self, prompt: str) -> int | None:
        """Tokens of a response to the prompt with this digest, in hexadecimal digits; None if it has had none."""
        if prompt.upper() not in self._known:
            return None
        _version, tokens = self._known[prompt.upper()]
        return round(tokens)

    def refresh(self) -> None:
        """Read what was written since the last call; files that cannot be read are counted in `errors`."""
        # Not only newer weights: the last responses of a step are written a moment after those of the next begin.
        since = self._newest - 1
        lengths: dict[tuple[str, int], list[int]] = defaultdict(list)

        def read(connection) -> None:
            for prompt, version, num_tokens in connection.execute(LENGTHS, (since,)).fetchall():
                lengths[prompt, version].append(num_tokens)

        read_files(self._folder, None, read, self._failed)
        for (prompt, version), new in lengths.items():
            known_version, _tokens = self._known.get(prompt, (0, 0.0))
            if version >= known_version:
                self._known[prompt] = version, statistics.geometric_mean(new)
            self._newest = max(self._newest, version)

    def _failed(self, error: Exception) -> None:
        self.errors += 1
        if self.errors == 1:
            logger.warning("lengths of earlier responses: %s (logged once, then counted)", error)
