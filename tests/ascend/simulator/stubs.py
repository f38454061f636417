"""Builds stand-ins for CANN's libraries, so that the real torch-npu can be imported where CANN is not installed.

Every symbol that torch-npu asks of CANN becomes a function that returns 0. Nothing computes with them: the simulator
answers before a call gets there. Needs gcc and nm; no binary is kept in the repository.

python stubs.py FOLDER
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

# What torch-npu's libraries name as NEEDED and CANN would bring. The first one gets the symbols, the others are empty.
LIBRARIES = ("ascendcl", "hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "atb")


def _symbols(library: Path, kind: str) -> set[str]:
    """kind: `--undefined-only` or `--defined-only`. Without a version, as CANN's are; glibc's carry one."""
    listing = subprocess.run(["nm", "-D", "--format=posix", kind, library], capture_output=True, text=True, check=True)
    fields = [line.split() for line in listing.stdout.splitlines()]
    return {name for name, symbol_type, *_ in fields if "@" not in name and symbol_type not in "wv"}


def _folder(package: str) -> Path:
    return Path(importlib.util.find_spec(package).origin).parent


def missing_symbols() -> list[str]:
    """Undefined in torch-npu, and defined neither there nor in torch nor in Python."""
    own = [*_folder("torch_npu").glob("*.so"), *_folder("torch_npu").glob("lib/*.so")]
    bundled = [path for path in (_folder("torch_npu").parent / "torch_npu.libs").glob("*.so*")]
    undefined = set().union(*(_symbols(path, "--undefined-only") for path in own))
    providers = [*own, *bundled, *_folder("torch").glob("lib/*.so")]
    defined = set().union(*(_symbols(path, "--defined-only") for path in providers))
    return sorted(name for name in undefined - defined if not name.startswith(("Py", "_Py")))


def build(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        f'long stub{index}(void) __asm__("{name}");\nlong stub{index}(void) {{ return 0; }}\n'
        for index, name in enumerate(missing_symbols())
    ]
    for index, name in enumerate(LIBRARIES):
        source = folder / f"{name}.c"
        source.write_text("".join(lines) if index == 0 else "")
        target = folder / f"lib{name}.so"
        subprocess.run(["gcc", "-shared", "-fPIC", "-o", target, source, f"-Wl,-soname,lib{name}.so"], check=True)
    (folder / "complete").touch()


if __name__ == "__main__":
    build(Path(sys.argv[1]))
