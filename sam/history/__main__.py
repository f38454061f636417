"""`python -m sam.history stat|verify|prune PATH`: look at a history, check it, make it smaller.

PATH is the folder of a history or one of its files. A run may go on meanwhile.
"""

import argparse
import sqlite3
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
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
    unusable,
)
from sam.history.reading import Row

COUNT, SUM = "SELECT count(*) FROM responses", "SELECT coalesce(sum(num_tokens), 0) FROM responses"


def stat(path: Path) -> Iterator[str]:
    """A few lines of each file."""
    for file in _files(path):
        with _opened(file, open_to_read) as connection:
            written_in = dict(connection.execute("SELECT key, value FROM meta"))
            responses, prompts, oldest, newest = connection.execute(
                "SELECT count(*), count(DISTINCT prompt), min(version), max(version) FROM responses"
            ).fetchone()
            versions = f"weight versions {oldest} to {newest}" if responses else "empty"
            yield f"{file}: {responses} responses to {prompts} prompts, {num_tokens(connection)} tokens, {versions}"
            yield f"  {file.stat().st_size / 2**20:.1f} MiB; " + "; ".join(
                f"{k} {written_in.get(k)}" for k in FINGERPRINT
            )


def verify(path: Path) -> Iterator[str]:
    """A line for each whole file.

    Raises:
        HistoryError: a damaged file, after all have been read.
    """
    damaged = []
    for file in _files(path):
        with _opened(file, open_to_read) as connection:
            if said := _damage(file, connection):
                damaged.append(said)
            else:
                yield f"{file}: {connection.execute(COUNT).fetchone()[0]} responses, none damaged"
    if damaged:
        raise HistoryError(f"{'; '.join(damaged)}: remove the file, runs go on without it")


def _damage(file: Path, connection: sqlite3.Connection) -> str | None:
    """What is wrong with a file, in words."""
    (said,), (total,) = (connection.execute(query).fetchone() for query in ("PRAGMA integrity_check(1)", COUNT))
    rows = connection.execute("SELECT id, version, digest, tokens FROM responses")
    shown = tqdm(rows, total=total, desc=file.name, disable=total < 10_000)
    wrong = sum(Row(*row).response() is None for row in shown)
    if counted := num_tokens(connection) - connection.execute(SUM).fetchone()[0]:
        said = f"the count of tokens is wrong by {counted}"
    return f"{file}: {wrong} of {total} responses are damaged, SQLite says {said}" if said != "ok" or wrong else None


def prune_files(path: Path, tokens: int, epochs: int) -> Iterator[str]:
    """Keep the bounds in each file, and give its free pages back to the file system.

    Raises:
        HistoryError: a file that `verify` finds damaged.
    """
    for file in _files(path):
        before = file.stat().st_size
        with _opened(file, open_existing) as connection:
            if said := _damage(file, connection):
                raise HistoryError(f"{said}: remove the file, runs go on without it")
            with transaction(connection):
                removed = prune(connection, tokens, epochs)
            connection.execute("VACUUM")
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            left = num_tokens(connection)
        sizes = f"{before / 2**20:.1f} to {file.stat().st_size / 2**20:.1f} MiB"
        yield f"{file}: {removed} responses removed, {left} tokens left, {sizes}"


@contextmanager
def _opened(file: Path, open_file: Callable[[Path], sqlite3.Connection]) -> Iterator[sqlite3.Connection]:
    try:
        with closing(open_file(file)) as connection:
            yield connection
    except sqlite3.Error as error:
        raise unusable(file, error) from error


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
    return run_command(actions[options.action])


if __name__ == "__main__":
    sys.exit(main())
