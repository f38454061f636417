"""Builds a folder of assets once for its settings, and the command that does."""

import fcntl
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path

from recipe.sam_dapo.record import read_json
from sam.command import Parser, run_command

BUILD_RECORD = "assets.json"


def build_once(
    output: Path, name: str, settings: dict, made_of: Iterable[Path | str], build: Callable[[Path], None]
) -> bool:
    """Have `build` fill `output`, unless it did so before with all of this the same; says whether it did.

    The folder is filled beside `output` and moved into place when complete; of several processes one builds, the others
    wait for it.

    Args:
        name: of the folder's content, in messages.
        settings: everything the user may set; kept in the folder's assets.json.
        made_of: files of code, and names of packages, that decide what is built.

    Raises:
        ValueError: `output` holds something else.
    """
    record = output / BUILD_RECORD
    digest = _digest(settings, made_of)
    output.parent.mkdir(parents=True, exist_ok=True)
    with (output.parent / f".{output.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if read_json(record).get("digest") == digest:
            return False
        if _holds_something_else(output):
            raise ValueError(
                f"output is {output}, which holds something else than {name} (no {BUILD_RECORD}): "
                "name a new folder, or remove this one"
            )
        with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as scratch:
            built = Path(scratch) / "built"
            built.mkdir()
            build(built)
            (built / BUILD_RECORD).write_text(json.dumps({"digest": digest, "settings": settings}, indent=2) + "\n")
            if output.exists():
                output.rename(Path(scratch) / "replaced")
            built.rename(output)
    return True


def _digest(settings: dict, made_of: Iterable[Path | str]) -> str:
    """Hash the settings, the content of files, and the versions of packages."""
    parts = [part.read_text() if isinstance(part, Path) else version(part) for part in made_of]
    return hashlib.sha256(json.dumps([settings, parts], sort_keys=True).encode()).hexdigest()


def _holds_something_else(output: Path) -> bool:
    """Whether there is something at a place where no build has been."""
    if not output.exists() or (output / BUILD_RECORD).is_file():
        return False
    return not output.is_dir() or any(output.iterdir())


def build_command(parser: Parser, arguments: list[str] | None, name: str, prepare: Callable[[Path, int], bool]) -> int:
    """The command that builds the assets called `name`; `prepare(folder, seed)` says whether it built them."""
    parser.add_argument("--output", type=Path, required=True, help="folder to put them in")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn (default 0)")
    options = parser.parse_args(arguments)
    if options.seed < 0:
        parser.error(f"--seed {options.seed}: expected a number from 0 up")

    def command() -> str:
        output = options.output.absolute()
        is_new = prepare(output, options.seed)
        return f"{name} {'built' if is_new else 'found'} in {output}"

    return run_command(command)
