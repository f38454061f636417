"""python3 tests/gpu/unpack.py FOLDER: takes the parts that FOLDER has, and builds /tmp/site once all are there.

May be called any number of times: parts gather in /tmp/kit. Exit code 0 when /tmp/site is ready, 3 while parts are
missing.
"""

import compileall
import hashlib
import json
import os
import shutil
import sys
import tarfile
import time
from pathlib import Path

GATHERED = Path(os.environ.get("KIT_PARTS", "/tmp/kit"))
SITE = Path(os.environ.get("KIT_SITE", "/tmp/site"))
DONE = ".unpacked"  # in the site's folder: the sha256 of what was unpacked


class Joined:
    """Files read one after another, as one; counts the sha256 of all."""

    def __init__(self, paths: list[Path]):
        self._files = [path.open("rb") for path in paths]
        self.sha256 = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        while self._files:
            if content := self._files[0].read(size):
                self.sha256.update(content)
                return content
            self._files.pop(0).close()
        return b""


def gather(folder: Path, parts: dict) -> list[str]:
    """Copy the parts that `folder` has to GATHERED; names of those that are missing or damaged."""
    GATHERED.mkdir(parents=True, exist_ok=True)
    missing = []
    for name, part in parts.items():
        kept, brought = GATHERED / name, folder / name
        if brought.is_file() and brought.resolve() != kept.resolve():
            shutil.copyfile(brought, kept)
        if not kept.is_file():
            missing.append(name)
        elif hashlib.sha256(kept.read_bytes()).hexdigest() != part["sha256"]:
            print(f"{name}: damaged, or of another pack: bring it again")
            missing.append(name)
    return missing


def unpack(paths: list[Path], expected: str) -> None:
    """Build the site's folder; it has its name only when it is whole."""
    partial = SITE.with_name(SITE.name + ".partial")
    for folder in (partial, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    joined = Joined(paths)
    with tarfile.open(fileobj=joined, mode="r|xz") as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extraction_filter = tarfile.tar_filter
        archive.extractall(partial)
    while joined.read(1 << 20):
        pass
    if joined.sha256.hexdigest() != expected:
        raise SystemExit("error: the joined parts are not what was packed")
    (partial / DONE).write_text(expected)
    partial.rename(SITE)


def main() -> int:
    if sys.version_info[:2] != (3, 12):
        print(f"warning: packed for Python 3.12, this is {sys.version.split()[0]}")
    folder = Path(sys.argv[1])
    manifest = json.loads((folder / "manifest.json").read_text())
    if missing := gather(folder, manifest["parts"]):
        print(f"of {len(manifest['parts'])} parts are missing: {' '.join(missing)}")
        return 3
    done = SITE / DONE
    if done.is_file() and done.read_text() == manifest["sha256"]:
        print(f"{SITE} is ready")
        return 0
    started = time.perf_counter()
    unpack([GATHERED / name for name in manifest["parts"]], manifest["sha256"])
    unpacked = time.perf_counter()
    compileall.compile_dir(SITE, quiet=2, workers=0)  # imports would compile 30 s' worth in every process
    print(
        f"{SITE} is ready: {len(manifest['wheels'])} packages, unpacked in {unpacked - started:.0f} s, compiled in "
        f"{time.perf_counter() - unpacked:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
