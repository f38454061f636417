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
        return "patched" if self.patched in content else "published" if self.published in content else "edited"


class Patches:
    """The patches and the package below `root`, the interpreter's by default; `installed`: its version or None."""

    def __init__(self, root: Path | None = None):
        spec = importlib.util.find_spec(PATCHES.parent.name)
        self.root = root or (Path(spec.origin).parent.parent if spec and spec.origin else None)
        found = importlib.metadata.distributions(name="vllm-ascend", path=[str(self.root)]) if self.root else ()
        self.installed = next((one.version for one in found), None)
        self.hunks = list(_hunks(self.root)) if self.installed == PATCHES.name else []

    @property
    def state(self) -> str:
        """not installed (in this version), published, patched, half patched or edited."""
        found = {hunk.state() for hunk in self.hunks} or {"not installed"}
        return "edited" if "edited" in found else found.pop() if len(found) == 1 else "half patched"

    def problem(self) -> str | None:
        """Why the patches are not active, in one line with its fix; None if they are."""
        wanted, state = f"vllm-ascend=={PATCHES.name}", self.state
        if state == "not installed":
            return f"{wanted} is not installed here, but {self.installed}: run this with the Python that has it"
        if state == "edited":
            edited = next(hunk.path.relative_to(self.root) for hunk in self.hunks if hunk.state() == state)
            return f"{edited} is neither as published nor as patched: save your changes, reinstall {wanted}"
        apply = f"{wanted} is not patched ({state}): run python -m recipe.sam_dapo.patch apply"
        return None if state == "patched" else apply

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
            for lines in (body.splitlines(keepends=True) for body in bodies):
                texts = ("".join(one[1:] for one in lines if one[0] != left_out) for left_out in "+-")
                yield Hunk(root / head.splitlines()[0], *texts)


def main(arguments: list[str] | None = None) -> int:
    """0: as asked. 2: refused, with a line that says why."""
    parser = Parser(prog="python -m recipe.sam_dapo.patch", description=__doc__)
    parser.add_argument("command", choices=["status", "apply", "revert"])
    parser.add_argument("--root", type=Path, help="folder that holds the package (default: this interpreter's)")
    options = parser.parse_args(arguments)
    patches, wanted = Patches(options.root), {"apply": "patched", "revert": "published"}.get(options.command)
    return run_command(lambda: patches.change(wanted) if wanted else patches.status())


if __name__ == "__main__":
    sys.exit(main())
