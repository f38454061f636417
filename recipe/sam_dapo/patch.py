"""`python -m recipe.sam_dapo.patch {status,apply,revert}`: the source patches of vllm-ascend, all or nothing."""

import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from sam.command import Parser, run_command

# Of this version; applied all or not at all.
PATCHES = Path(__file__).resolve().with_name("patches") / "vllm_ascend" / "0.23.0.post1"


class Hunk(NamedTuple):
    """Lines of an installed file that a patch replaces: as published and as patched."""

    path: Path
    published: str
    patched: str

    def state(self) -> str:
        content = self.path.read_text() if self.path.is_file() else ""
        if self.patched in content:
            return "patched"
        return "published" if self.published in content else "edited"


class Patches:
    """The patches and the package below `root`, the interpreter's by default; `installed`: its version or None."""

    def __init__(self, root: Path | None = None):
        spec = importlib.util.find_spec(PATCHES.parent.name)
        if root is None and spec is not None and spec.origin:
            root = Path(spec.origin).parent.parent
        self.root = root
        packages = importlib.metadata.distributions(name="vllm-ascend", path=[str(root)]) if root else ()
        self.installed = next((package.version for package in packages), None)
        self.hunks = list(_hunks(root)) if self.installed == PATCHES.name else []

    @property
    def state(self) -> str:
        """not installed (in this version), published, patched, half patched or edited."""
        states = {hunk.state() for hunk in self.hunks} or {"not installed"}
        if "edited" in states:
            return "edited"
        return states.pop() if len(states) == 1 else "half patched"

    def problem(self) -> str | None:
        """Why the patches are not active, in one line with its fix; None if they are."""
        package = f"vllm-ascend=={PATCHES.name}"
        state = self.state
        if state == "patched":
            return None
        if state == "not installed":
            return f"{package} is not installed here, but {self.installed}: run this with the Python that has it"
        if state == "edited":
            edited = next(hunk.path.relative_to(self.root) for hunk in self.hunks if hunk.state() == state)
            return f"{edited} is neither as published nor as patched: save your changes, reinstall {package}"
        return f"{package} is not patched ({state}): run python -m recipe.sam_dapo.patch apply"

    def status(self) -> str:
        """The state of the package, in one line."""
        where = f" {self.installed} in {self.root}" if self.installed else ""
        return f"vllm-ascend{where}: {self.state} ({', '.join(path.name for path in sorted(PATCHES.glob('*.patch')))})"

    def change(self, wanted: str) -> str:
        """Bring every file to the state `wanted`, patched or published; returns the status. ValueError: edited or not
        installed; nothing was changed."""
        if self.state in ("not installed", "edited"):
            raise ValueError(self.problem())
        for hunk in self.hunks:
            content = hunk.path.read_text()
            hunk.path.write_text(content.replace(getattr(hunk, hunk.state()), getattr(hunk, wanted)))
        return self.status()


def _hunks(root: Path) -> Iterator[Hunk]:
    for patch in sorted(PATCHES.glob("*.patch")):
        for file in re.split(r"^--- a/", patch.read_text(), flags=re.MULTILINE)[1:]:
            head, *bodies = re.split(r"^@@.*\n", file, flags=re.MULTILINE)
            path = root / head.splitlines()[0]
            for body in bodies:
                lines = body.splitlines(keepends=True)
                published = "".join(line[1:] for line in lines if line[0] != "+")
                patched = "".join(line[1:] for line in lines if line[0] != "-")
                yield Hunk(path, published, patched)


def main(arguments: list[str] | None = None) -> int:
    """0: as asked. 2: refused, with a line that says why."""
    parser = Parser(prog="python -m recipe.sam_dapo.patch", description=__doc__)
    parser.add_argument("command", choices=["status", "apply", "revert"])
    parser.add_argument("--root", type=Path, help="folder that holds the package (default: this interpreter's)")
    options = parser.parse_args(arguments)
    patches = Patches(options.root)
    if options.command == "status":
        return run_command(patches.status)
    wanted = {"apply": "patched", "revert": "published"}[options.command]
    return run_command(lambda: patches.change(wanted))


if __name__ == "__main__":
    sys.exit(main())
