"""The file of a history: SQLite, one for each machine, which all engine processes of the machine read and write.

SQLite since Python brings it, and since it has what a file of our own would need: transactions that a killed process
leaves whole, several writing processes, a bound on damage when the disk is full. Its locks are not to be relied on
between machines: a folder holds a file for each, and whoever reads merges them.
"""

import hashlib
import logging
import math
import os
import re
import socket
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from sam.drafting.texts import digest
from sam.trained_drafter import settings_of

logger = logging.getLogger(__name__)

SUFFIX = ".sqlite"
BUSY_SECONDS = 30.0  # to wait for another process's transaction
FORMAT = 3
SCHEMA = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value)",
    """CREATE TABLE responses (
    id INTEGER PRIMARY KEY,
    prompt BLOB NOT NULL,      -- blake2b of the prompt's tokens
    digest BLOB NOT NULL,      -- blake2b of the response's: a repeated step adds nothing
    version INTEGER NOT NULL,  -- weight syncs up to the response, over all runs
    num_tokens INTEGER NOT NULL,
    tokens BLOB NOT NULL,      -- int32
    UNIQUE (prompt, digest)
)""",
    "CREATE INDEX by_version ON responses (version, id, num_tokens)",
    f"PRAGMA user_version = {FORMAT}",
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
MAX_PROMPTS = 1 << 20  # whose lengths are kept in memory; beyond, those of prompts that were read first go
LENGTHS = (
    "SELECT hex(prompt), version, num_tokens FROM responses WHERE version >= ? AND num_tokens > 0 "
    "AND typeof(version) = 'integer' AND typeof(num_tokens) = 'integer'"
)
# The first of these that a model's folder has decides what a token id means.
TOKENIZER_FILES = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"), ("vocab.txt",))
SHAPE = ("hidden_size", "num_hidden_layers", "vocab_size")


class HistoryError(ValueError):
    """A history cannot be used; one line says why and what to do."""


def own_file(folder: Path) -> Path:
    """This machine's file in the folder of a history."""
    return folder / (re.sub(r"[^\w.-]", "_", socket.gethostname()) + SUFFIX)


def fingerprint(model: str) -> dict[str, str]:
    """What `model`, a folder or a name, writes in: token ids of another mean something else.

    Returns:
        tokenizer: a hash of its file, or the name where there is no folder. model: its type and sizes, as in
        "qwen3, hidden_size 128, num_hidden_layers 2, vocab_size 64"; training does not change them.
    """
    folder = Path(model)
    if not folder.is_dir():
        return {"tokenizer": model, "model": model}
    found = next((names for names in TOKENIZER_FILES if all((folder / name).is_file() for name in names)), ())
    tokenizer = hashlib.blake2b(b"".join((folder / name).read_bytes() for name in found), digest_size=8)
    config = settings_of(folder)
    text = config.get("text_config")  # of models that read pictures too
    sizes = config | (text if isinstance(text, dict) else {})
    described = [str(config.get("model_type")), *(f"{name} {sizes[name]}" for name in SHAPE if name in sizes)]
    return {"tokenizer": tokenizer.hexdigest() if found else "none", "model": ", ".join(described)}


def open_file(file: Path, written_in: dict[str, str] | None, to_write: bool = False) -> sqlite3.Connection | None:
    """Open a file, to write a new one if need be; None: to read, and another process is making it.

    Raises:
        HistoryError: it cannot be opened, is damaged, or is of another tokenizer or model than `written_in`.
    """
    # What another machine may be writing is read as far as it goes.
    mode = "rwc" if to_write else "rw" if file.name == own_file(file.parent).name else "ro&immutable=1"
    connection = None
    try:
        if to_write:
            file.parent.mkdir(parents=True, exist_ok=True)
        uri = f"{file.absolute().as_uri()}?mode={mode}"
        connection = sqlite3.connect(uri, timeout=BUSY_SECONDS, isolation_level=None, uri=True)
        with connection:
            connection.execute("BEGIN IMMEDIATE" if to_write else "BEGIN")
            is_empty = connection.execute("PRAGMA user_version").fetchone() == (0,)
            if is_empty and to_write:
                for statement in SCHEMA:
                    connection.execute(statement)
                connection.executemany("INSERT INTO meta VALUES (?, ?)", written_in.items())
            if to_write or not is_empty:
                _check(connection, file, written_in)
        return connection if to_write or not is_empty else connection.close()
    except (HistoryError, sqlite3.Error, OSError) as error:
        if connection is not None:
            connection.close()
        raise error if isinstance(error, HistoryError) else unusable(file, error) from error


def _check(connection: sqlite3.Connection, file: Path, written_in: dict[str, str] | None) -> None:
    """Raise HistoryError unless the file has this format, and was written with this tokenizer and model."""
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    if found != FORMAT:
        raise HistoryError(f"{file}: a history of format {found}, expected {FORMAT}: remove it, or name a new folder")
    there = dict(connection.execute("SELECT key, value FROM meta"))
    for key, value in (written_in or {}).items():
        if there.get(key) != value:
            raise HistoryError(
                f"{file}: a history of {key} {there.get(key)}, this run has {value}: "
                "choose another speculation.history_path, or remove it"
            )


def unusable(file: Path, error: Exception) -> HistoryError:
    """The line for what SQLite or the file system says."""
    return HistoryError(f"{file}: {error}: name a folder that can be written, or remove the file if it is damaged")


def check_folder(folder: Path, written_in: dict[str, str] | None) -> None:
    """Raise HistoryError unless a run of this tokenizer and model could write to `folder`; makes nothing."""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise unusable(folder, OSError(f"{existing} is no folder that can be written"))

    def failed(error: HistoryError) -> None:
        raise error

    read_files(folder, written_in, lambda connection: None, failed)


def read_files(folder: Path, written_in: dict[str, str] | None, read: Callable, failed: Callable) -> None:
    """Call `read` with a connection to each file of a history; `failed` is told why one cannot be read."""
    for file in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            if (connection := open_file(file, written_in)) is not None:
                with closing(connection):
                    read(connection)
        except (HistoryError, sqlite3.Error) as error:
            failed(error)


def add(
    connection: sqlite3.Connection, responses: Sequence[tuple[bytes, int, np.ndarray]], tokens: int, epochs: int
) -> None:
    """Add responses and keep the bounds, all or nothing.

    Args:
        responses: the prompt's digest, the version of the weights that wrote it, and int32 [length] tokens, each.
        tokens: that the file may hold; those of the oldest weights go first.
        epochs: versions of the weights of which a prompt's responses are kept, the newest ones.
    """
    rows = [(prompt, digest(text), version, len(text), text.tobytes()) for prompt, version, text in responses]
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany(ADD, rows)
        connection.executemany(DROP_EPOCHS, {(prompt, epochs) for prompt, *_ in responses})
        if connection.execute("SELECT total(num_tokens) FROM responses").fetchone()[0] > tokens:
            connection.execute(DROP_OLDEST, (tokens,))


def read(connection: sqlite3.Connection, prompt: bytes) -> Iterator[tuple[int, bytes, np.ndarray | None]]:
    """A prompt's responses: version, digest, and int32 [length] tokens, None for damaged ones: SQLite does not look."""
    query = "SELECT CAST(version AS INTEGER), digest, CAST(tokens AS BLOB) FROM responses WHERE prompt = ?"
    for version, known, blob in connection.execute(query, (prompt,)):
        tokens = np.frombuffer(blob[: len(blob) // 4 * 4], np.int32).copy()
        yield version, known, tokens if digest(tokens) == known else None


class ResponseLengths:
    """How long responses to each prompt were, for who plans a rollout before any of its responses has finished: the
    geometric mean of those that the newest weights gave, of all files of a history.

    Equal responses count once, those of a single token not at all: the file does not keep them. One thread may refresh
    while another asks: nobody who asks waits for a file.

    Attributes:
        errors: files that could not be read; the first is warned of.
    """

    def __init__(self, folder: Path):
        self._folder, self._newest, self.errors = folder, 0, 0
        self._known: dict[str, tuple[int, float]] = {}  # by prompt: the version of the weights, tokens

    def __len__(self) -> int:
        return len(self._known)

    def expected(self, prompt: str) -> int | None:
        """Tokens of a response to the prompt with this sam.drafting.texts.digest, in hexadecimal digits; None if
        it has had none."""
        found = self._known.get(prompt.upper())
        return round(found[1]) if found else None

    def refresh(self) -> None:
        """Read what was written since the last call; files that cannot be read are counted and left out."""
        # Not only newer weights: the last responses of a step are written a moment after those of the next begin.
        since, logs = self._newest - 1, defaultdict(list)

        def read(connection) -> None:
            for prompt, version, num_tokens in connection.execute(LENGTHS, (since,)).fetchall():
                logs[prompt, version].append(math.log(num_tokens))

        read_files(self._folder, None, read, self._failed)
        for (prompt, version), found in logs.items():
            if version >= self._known.get(prompt, (0, 0.0))[0]:
                self._known[prompt] = version, math.exp(sum(found) / len(found))
            self._newest = max(self._newest, version)
        for prompt in list(self._known)[: len(self._known) - MAX_PROMPTS]:
            del self._known[prompt]

    def _failed(self, error: Exception) -> None:
        if self.errors == 0:
            logger.warning("lengths of earlier responses: %s (logged once, then counted)", error)
        self.errors += 1
