"""Patches of installed packages: what scripts/patch.py does, and what preflight asks.

`patches/PACKAGE/VERSION/` holds numbered unified diffs and `manifest.json` with the SHA-256 of every file before and
after all of them. A package is patched all or nothing: its files are all as published or all as patched, or the tool
says what is wrong and changes nothing.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
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
        if self.installed is None:
            return "absent"
        if self.installed != self.version:
            return "wrong version"
        found = set(self.states.values())
        if "edited" in found:
            return "edited"
        return found.pop() if len(found) == 1 else "half-applied"

    def problem(self) -> str | None:
        """Why the series is not active, in one line with its fix; None if it is, or if the package is absent."""
        reinstall = f"reinstall {self.distribution}=={self.version}, then python scripts/patch.py apply"
        edited = ", ".join(sorted(name for name, state in self.states.items() if state == "edited"))
        return {
            "absent": None,
            "patched": None,
            "published": f"{self.distribution} {self.version} is not patched: run python scripts/patch.py apply",
            "half-applied": f"{self.distribution} {self.version} is half patched: run python scripts/patch.py revert, "
            "then apply",
            "wrong version": f"{self.distribution} {self.installed} is installed, the patches are for {self.version}: "
            f"install {self.distribution}=={self.version}",
            "edited": f"{edited} is neither as published nor as patched: keep your changes elsewhere and {reinstall}",
        }[self.state]


def load(root: Path | None = None, patches: Path = PATCHES) -> list[Series]:
    """Every series in `patches`, compared with the packages below `root` (the interpreter's own by default)."""
    series = []
    for manifest in sorted(patches.glob("*/*/manifest.json")):
        content = json.loads(manifest.read_text())
        distribution, spec = content["distribution"], importlib.util.find_spec(manifest.parent.parent.name)
        where = root or (Path(spec.origin).parent.parent if spec and spec.origin else None)
        found = importlib.metadata.distributions(name=distribution, path=[str(where)]) if where else ()
        installed = next((one.version for one in found), None)
        one = Series(manifest.parent, distribution, content["files"], where, installed)
        if installed == one.version:
            one.states = {name: _state_of(where / name, wanted) for name, wanted in one.hashes.items()}
        series.append(one)
    return series


def _state_of(path: Path, wanted: dict[str, str]) -> str:
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None
    return {wanted["published"]: "published", wanted["patched"]: "patched"}.get(digest, "edited")


def apply(series: Series) -> str:
    """Patch a published tree; a patched one is left as it is. Says what was done.

    Raises:
        PatchError: half applied, edited, or another version.
    """
    return _change(series, "patched", f"applied {', '.join(path.name for path in series.patches)}")


def revert(series: Series) -> str:
    """Bring a patched or half-patched tree back to the published bytes. Says what was done.

    Raises:
        PatchError: edited, or another version.
    """
    return _change(series, "published", "as published again")


def _change(series: Series, wanted: str, done: str) -> str:
    """Bring every file of a series to the state `wanted`; git writes nothing unless all patches fit."""
    head, backwards = f"{series.distribution} {series.version}", wanted == "published"
    if series.state == wanted:
        return f"{head}: already {'as published' if backwards else 'patched'}"
    if series.state not in (("patched", "half-applied") if backwards else ("published",)):
        raise PatchError(series.problem())
    if shutil.which("git") is None:
        raise PatchError("git is not installed, and applies the patches: install it")
    included = [f"--include={name}" for name, state in series.states.items() if state != wanted]
    command = ["git", "apply", "--whitespace=nowarn", *included, *(["--reverse"] if backwards else [])]
    command += sorted(map(str, series.patches), reverse=backwards)
    # Above a ceiling git looks for no repository: paths are then relative to the folder.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(series.root.resolve().parent)}
    finished = subprocess.run(command, cwd=series.root, env=environment, capture_output=True, text=True)
    if finished.returncode:
        raise PatchError(f"{finished.stderr.strip().splitlines()[-1].removeprefix('error: ')}; nothing was changed")
    return f"{head}: {done}"


def status(series: Series) -> str:
    if series.state == "absent":
        return f"{series.distribution}: not installed here"
    head = f"{series.distribution} {series.installed} in {series.root}: {series.state}"
    active = "active" if series.state == "patched" else "not active"
    return "\n".join([head, *(f"  {path.name}: {active}" for path in series.patches)])


def check(series: Series) -> str:
    """Say that a series is active.

    Raises:
        PatchError: it is not.
    """
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
    if options.command == "status":
        print("\n".join(map(status, every)))
        return 0
    present = [series for series in every if series.state != "absent"]
    if not present:
        names = ", ".join(f"{series.distribution}=={series.version}" for series in every)
        print(f"error: none of {names} is installed here: run this with the Python that has it", file=sys.stderr)
        return 2
    act = {"check": check, "apply": apply, "revert": revert}[options.command]
    return run_command(lambda: map(act, present), (PatchError,), code=1)
