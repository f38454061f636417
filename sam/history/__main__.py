"""`python -m sam.history stat|verify|prune PATH`: look at a history, check it, make it smaller.

PATH is the folder of a history or one of its files. A run may go on meanwhile.
"""

import argparse
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from tqdm import tqdm

from sam.command import run_command
from sam.history.database import (
    FINGERPRINT,
    HistoryError,
    files,
    num_tokens,
    open_existing,
    open_to_read,
    prune,
    transaction,
)
from sam.history.reading import Row


def stat(path: Path) -> Iterator[str]:
    """A few lines of each file."""
    for file in _files(path):
        with closing(open_to_read(file)) as connection:
            written_in = dict(connection.execute("SELECT key, value FROM meta"))
            responses, prompts, oldest, newest = connection.execute(
                "SELECT count(*), count(DISTINCT prompt), min(version), max(version) FROM responses"
            ).fetchone()
            versions = f"weight versions {oldest} to {newest}" if responses else "empty"
            yield f"{file}: {responses} responses to {prompts} prompts, {num_tokens(connection)} tokens, {versions}"
            yield f"  {file.stat().st_size / 2**20:.1f} MiB; " + "; ".join(f"{k} {written_in[k]}" for k in FINGERPRINT)


def verify(path: Path) -> Iterator[str]:
    """A line for each whole file.

    Raises:
        HistoryError: a damaged file, after all have been read.
    """
    damaged = []
    for file in _files(path):
        with closing(open_to_read(file)) as connection:
            (said,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            (total,) = connection.execute("SELECT count(*) FROM responses").fetchone()
            rows = connection.execute("SELECT id, version, digest, tokens FROM responses")
            shown = tqdm(rows, total=total, desc=file.name, disable=total < 10_000)
            wrong = sum(Row(*row).response() is None for row in shown)
            if counted := num_tokens(connection) - _sum_of_tokens(connection):
                said = f"the count of tokens is wrong by {counted}"
        if said != "ok" or wrong:
            damaged.append(f"{file}: {wrong} of {total} responses are damaged, SQLite says {said}")
        else:
            yield f"{file}: {total} responses, none damaged"
    if damaged:
        raise HistoryError(f"{'; '.join(damaged)}: remove the file, runs go on without it")


def _sum_of_tokens(connection: sqlite3.Connection) -> int:
    return connection.execute("SELECT coalesce(sum(num_tokens), 0) FROM responses").fetchone()[0]


def prune_files(path: Path, tokens: int, epochs: int) -> Iterator[str]:
    """Keep the bounds in each file, and give its free pages back to the file system."""
    for file in _files(path):
        before = file.stat().st_size
        with closing(open_existing(file)) as connection:
            with transaction(connection):
                removed = prune(connection, tokens, epochs)
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            left = num_tokens(connection)
        sizes = f"{before / 2**20:.1f} to {file.stat().st_size / 2**20:.1f} MiB"
        yield f"{file}: {removed} responses removed, {left} tokens left, {sizes}"


def _files(path: Path) -> list[Path]:
    if not (found := files(path)):
        raise HistoryError(f"{path}: no history there: name the folder that speculation.history_path named")
    return found


def main(arguments: list[str] | None = None) -> int:
    """0: done. 2: no history, or a damaged one."""
    parser = argparse.ArgumentParser(prog="python -m sam.history", description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["stat", "verify", "prune"])
    parser.add_argument("path", type=Path)
    parser.add_argument("--tokens", type=int, default=2**62, help="prune: tokens that a file may hold")
    parser.add_argument("--epochs", type=int, default=2, help="prune: steps of which a prompt's responses are kept")
    options = parser.parse_args(arguments)
    if options.tokens < 0 or options.epochs < 1:
        parser.error("expected --tokens of 0 or more, and --epochs of 1 or more")
    actions = {
        "stat": lambda: stat(options.path),
        "verify": lambda: verify(options.path),
        "prune": lambda: prune_files(options.path, options.tokens, options.epochs),
    }
    return run_command(actions[options.action], errors=(ValueError, OSError, sqlite3.Error))


if __name__ == "__main__":
    sys.exit(main())
