"""What the commands of this package share: how they parse, what they print, and how they end."""

import argparse
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NoReturn

INTERRUPTED = 130  # exit code, as a shell has it for Ctrl-C
SILENCE = 5.0  # seconds that a command says nothing
CLEAR = "\r\x1b[K"  # a terminal's line


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}", file=sys.stderr)
        sys.exit(2)


def run_command(
    command: Callable[[], int | str | Iterable[str]], errors: tuple = (ValueError, OSError), code: int = 2
) -> int:
    """Print the text that `command` returns, or its texts one by one; returns the exit code, or `command`'s own.

    Errors of the kinds `errors` are the user's to mend: one line, and exit code `code`.
    """
    try:
        result = command()
        if isinstance(result, int):
            return result
        for text in [result] if isinstance(result, str) else result:
            print(text, flush=True)
    except errors as error:
        print(f"error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return code
    return 0


@contextmanager
def waiting(what: str, silence: float = SILENCE) -> Iterator[None]:
    """Say on standard error what is being done every `silence` seconds; on a terminal in one line that moves."""
    ended = threading.Event()
    begun = time.monotonic()
    screen = os.dup(2)  # which `quiet` leaves alone
    moves = os.isatty(screen)

    def say() -> None:
        while not ended.wait(silence):
            line = f"{what}: {time.monotonic() - begun:.0f} s"
            os.write(screen, f"{CLEAR}{line}".encode() if moves else f"{line}\n".encode())
        if moves:
            os.write(screen, CLEAR.encode())

    speaker = threading.Thread(target=say, daemon=True)
    speaker.start()
    try:
        yield
    finally:
        ended.set()
        speaker.join()
        os.close(screen)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what other packages print off the screen, whichever way they write; after an exception it is shown."""
    _flush()
    screen = [os.dup(1), os.dup(2)]
    with tempfile.TemporaryFile() as kept:
        for stream in (1, 2):
            os.dup2(kept.fileno(), stream)
        failed = False
        try:
            yield
        except Exception:  # of any kind: then all is shown
            failed = True
            raise
        finally:
            _flush()
            for stream, place in enumerate(screen, 1):
                os.dup2(place, stream)
                os.close(place)
            if failed:
                kept.seek(0)
                os.write(2, kept.read())


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def number(least: int) -> Callable[[str], int]:
    """A type of argparse's: whole numbers from `least`."""

    def convert(word: str) -> int:
        value = int(word)
        if value < least:
            raise argparse.ArgumentTypeError(f"{word}: expected {least} or more")
        return value

    return convert


def laid_out(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table, its columns as wide as they must be.

    Example:
        >>> laid_out(["engine", "s"], [["off", "12"]])
        ['engine   s', '   off  12']
    """
    table = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(map(str.rjust, row, widths)) for row in table]


def what_hides_the_recipe() -> str | None:
    """Name the file that hides `recipe.sam_dapo`, with the remedy, in one line; None if nothing does.

    `recipe` is a namespace that verl's own recipes share: a folder of that name with an `__init__.py` takes it for
    itself. The processes of a run look into the folder that they start in first.
    """
    spec = PathFinder.find_spec("recipe", [os.getcwd(), *sys.path])
    if spec is None or spec.origin is None:
        return None
    if (Path(spec.origin).parent / "sam_dapo").is_dir():
        return None
    return f"{spec.origin} hides recipe.sam_dapo: remove that file, which a namespace does without, or start elsewhere"
