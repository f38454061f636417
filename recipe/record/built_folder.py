"""A folder of files that commands build once: complete or not there, by one process at a time."""

import fcntl
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from recipe.record.run_directory import read_json

RECORD = "assets.json"


@dataclass(frozen=True)
class Contents:
    """What a folder is built from.

    Attributes:
        name: of the folder's content, in messages.
        settings: everything the user may set; kept in the folder's assets.json.
        sources: files of code that decide what is built.
        packages: distributions whose versions decide what is built.
    """

    name: str
    settings: dict
    sources: Iterable[Path]
    packages: Iterable[str]

    def digest(self) -> str:
        """A hash of settings, sources and versions."""
        record = {
            "settings": self.settings,
            "sources": [hashlib.sha256(path.read_bytes()).hexdigest() for path in self.sources],
            "versions": [version(package) for package in self.packages],
        }
        return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def build_once(output: Path, contents: Contents, build: Callable[[Path], None]) -> bool:
    """Has `build` fill `output`, unless what `contents` describes is there already; says whether it did.

    The folder is filled beside `output` and moved into place when complete; of several processes one builds, the others
    wait for it.

    Raises:
        ValueError: `output` holds something else.
    """
    digest = contents.digest()
    if _digest_found(output) == digest:
        return False
    output.parent.mkdir(parents=True, exist_ok=True)
    with _locked(output.parent / f".{output.name}.lock", contents.name):
        if (found := _digest_found(output)) == digest:
            return False
        if found is None and output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise ValueError(
                f"output is {output}, which holds something else than {contents.name} (no {RECORD}): "
                "name a new folder, or remove this one"
            )
        with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as scratch:
            built = Path(scratch) / "built"
            built.mkdir()
            build(built)
            record = {"digest": digest, "settings": contents.settings}
            (built / RECORD).write_text(json.dumps(record, indent=2) + "\n")
            if output.exists():
                output.rename(Path(scratch) / "replaced")
            built.rename(output)
    return True


def _digest_found(output: Path) -> str | None:
    """None where nothing was built, empty where its record is damaged."""
    record = output / RECORD
    return read_json(record).get("digest", "") if record.is_file() else None


@contextmanager
def _locked(path: Path, name: str) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process is building the {name}: waiting for it", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
