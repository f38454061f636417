"""Patches of installed packages: what scripts/patch.py does, and what preflight asks.

`patches/PACKAGE/VERSION/` holds numbered diffs and `manifest.json` with the SHA-256 of every file before and after all
of them. A package is patched all or nothing: git writes nothing unless every diff fits.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from sam.command import run_command

PATCHES = Path(__file__).resolve().parents[2] / "patches"


class PatchError(Exception):
    """One line: what is wrong and what to do."""


@dataclass
class Series:
    """The patches of one package version and the tree they apply to.

    root: the folder that holds the package, usually site-packages. installed: its version, None if it is not there.
    states: of each file, published, patched or edited.
    """

    folder: Path
    distribution: str
    hashes: dict[str, dict[str, str]]
    root: Path | None
    installed: str | None
    states: dict[str, str] = field(default_factory=dict)

    @property
    def version(self) -> str:
        return self.folder.name

    @property
    def patches(self) -> list[Path]:
        """In the order in which they apply."""
        return sorted(self.folder.glob("*.patch"))

    @property
    def state(self) -> str:
        """absent, wrong version, published, patched, half-applied or edited."""
        if self.installed != self.version:
            return "wrong version" if self.installed else "absent"
        found = set(self.states.values())
        return "edited" if "edited" in found else found.pop() if len(found) == 1 else "half-applied"

    def problem(self) -> str | None:
        """Why the series is not active, in one line with its fix; None if it is, or if the package is absent."""
        name = f"{self.distribution} {self.version}"
        package = f"{self.distribution}=={self.version}"
        edited = ", ".join(sorted(name for name, state in self.states.items() if state == "edited"))
        return {
            "published": f"{name} is not patched: run python scripts/patch.py apply",
            "half-applied": f"{name} is half patched: run python scripts/patch.py revert, then apply",
            "wrong version": f"{self.distribution} {self.installed} is installed, the patches are for {self.version}: "
            f"install {package}",
            "edited": f"{edited} is neither as published nor as patched: keep your changes elsewhere and reinstall "
            f"{package}, then python scripts/patch.py apply",
        }.get(self.state)


def load(root: Path | None = None) -> list[Series]:
    """Every series of `patches/`, compared with the packages below `root` (the interpreter's own by default)."""
    series = []
    for manifest in sorted(PATCHES.glob("*/*/manifest.json")):
        content, spec = json.loads(manifest.read_text()), importlib.util.find_spec(manifest.parent.parent.name)
        where = root or (Path(spec.origin).parent.parent if spec and spec.origin else None)
        found = importlib.metadata.distributions(name=content["distribution"], path=[str(where)]) if where else ()
        installed = next((one.version for one in found), None)
        series.append(one := Series(manifest.parent, content["distribution"], content["files"], where, installed))
        if installed == one.version:
            one.states = {name: _state_of(where / name, wanted) for name, wanted in one.hashes.items()}
    return series


def _state_of(path: Path, wanted: dict[str, str]) -> str:
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None
    return {wanted["published"]: "published", wanted["patched"]: "patched"}.get(digest, "edited")


def change(series: Series, wanted: str) -> str:
    """Bring every file to the state `wanted`, patched or published, and say what was done.

    Raises:
        PatchError: edited, another version, half applied and to be patched, or git says no.
    """
    head, done = f"{series.distribution} {series.version}", "patched" if wanted == "patched" else "as published"
    if series.state == wanted:
        return f"{head}: already {done}"
    if series.state not in (("published",) if wanted == "patched" else ("patched", "half-applied")):
        raise PatchError(series.problem())
    included = [f"--include={name}" for name, state in series.states.items() if state != wanted]
    command = ["git", "apply", "--whitespace=nowarn", *included, *(["--reverse"] * (wanted == "published"))]
    command += sorted(map(str, series.patches), reverse=wanted == "published")
    # Above a ceiling git looks for no repository: paths are then relative to the folder.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(series.root.resolve().parent)}
    try:
        finished = subprocess.run(command, cwd=series.root, env=environment, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise PatchError("git is not installed, and applies the patches: install it") from error
    if finished.returncode:
        raise PatchError(f"{finished.stderr.strip().splitlines()[-1].removeprefix('error: ')}; nothing was changed")
    return f"{head}: {done} ({', '.join(path.name for path in series.patches)})"


def status(series: Series) -> str:
    """The state of a package, in one line."""
    where = f" {series.installed} in {series.root}" if series.installed else ""
    return f"{series.distribution}{where}: {series.state} ({', '.join(path.name for path in series.patches)})"


def check(series: Series) -> str:
    """Say that a series is active, or raise PatchError."""
    if problem := series.problem():
        raise PatchError(problem)
    return f"{series.distribution} {series.version}: patched"


def main(arguments: list[str] | None = None) -> int:
    """0: as asked; for `check`, patched. 1: refused, with a line that says why. 2: nothing installed to patch."""
    parser = argparse.ArgumentParser(prog="scripts/patch.py", description=__doc__)
    parser.add_argument("command", choices=["status", "check", "apply", "revert"])
    parser.add_argument("--root", type=Path, help="folder that holds the packages (default: this interpreter's)")
    options = parser.parse_args(arguments)
    every = load(options.root)
    present = every if options.command == "status" else [series for series in every if series.state != "absent"]
    if not present:
        names = ", ".join(f"{series.distribution}=={series.version}" for series in every)
        print(f"error: none of {names} is installed here: run this with the Python that has it", file=sys.stderr)
        return 2
    act = {
        "status": status,
        "check": check,
        "apply": lambda series: change(series, "patched"),
        "revert": lambda series: change(series, "published"),
    }[options.command]
    return run_command(lambda: map(act, present), (PatchError,), code=1)
