"""python3 tree.py WHEELS SITE: unpacks wheels into one folder, without what the GPU machine does not need.

Left out of vLLM: FlashAttention 2 (FlashAttention 3 serves an H100 or H200), the kernels of experts, headers and
libraries of DeepGEMM, headers for Blackwell, the Rust front end, pages of the API server; device code for other chips
is zeroed. Left out of other packages: archives of static libraries, debugging symbols, tokenizers of Mistral.
"""

import fnmatch
import shutil
import struct
import sys
import zipfile
from pathlib import Path

import fatbin

CHIP = 90
PYTHON = "312"
LEFT_OUT = (
    "vllm/vllm-rs",
    "vllm/_moe_C*",
    "vllm/vllm_flash_attn/_vllm_fa2_C.*",
    "vllm/third_party/deep_gemm/include/*",
    "vllm/third_party/fmha_sm100/*",
    "vllm/entrypoints/serve/instrumentator/static/*",
    "mistral_common/data/*",
    "*.a",
    "*.lib",
    "*/tests/*",
)
WITH_DEVICE_CODE = ("vllm/*.so", "vllm/vllm_flash_attn/*.so")
ANYWHERE = "purelib", "platlib"  # of a wheel's NAME.data folder: what belongs beside the packages


def place_of(name: str) -> str | None:
    """Where a wheel's file belongs under the site folder; None for scripts, and for what is left out."""
    parts = name.split("/")
    if parts[0].endswith(".data"):
        if parts[1] not in ANYWHERE:
            return None
        name = "/".join(parts[2:])
    other_python = ".cpython-3" in name and f".cpython-{PYTHON}" not in name
    if name.endswith("/") or other_python or any(fnmatch.fnmatchcase(name, pattern) for pattern in LEFT_OUT):
        return None
    return name


def without_symbols(library: bytes) -> bytes:
    """An ELF library up to the end of what a process maps: section headers and debugging symbols lie behind."""
    if library[:6] != b"\x7fELF\x02\x01":
        return library
    programs, sections = struct.unpack_from("<QQ", library, 32)
    size, count = struct.unpack_from("<HH", library, 54)
    ends = []
    for place in range(programs, programs + size * count, size):
        offset, mapped = struct.unpack_from("<8xQ16xQ", library, place)
        ends.append(offset + mapped)
    result = bytearray(library[: max(ends)])
    struct.pack_into("<Q", result, 40, 0)  # no section headers
    struct.pack_into("<HH", result, 60, 0, 0)
    return bytes(result)


def main() -> None:
    wheels, site = Path(sys.argv[1]), Path(sys.argv[2])
    shutil.rmtree(site, ignore_errors=True)
    total = 0
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if (place := place_of(name)) is None:
                    continue
                content = archive.read(name)
                if any(fnmatch.fnmatchcase(place, pattern) for pattern in WITH_DEVICE_CODE):
                    content = fatbin.lean(content, CHIP)
                elif place.endswith(".so") or ".so." in place:
                    content = without_symbols(content)
                path = site / place
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                total += len(content)
    # An installed sam-rollout as vLLM sees it: its entry point. Its code is the repository's, on PYTHONPATH.
    info = site / "sam_rollout-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sam-rollout\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nsam = sam.vllm.plugin:register\n")
    (info / "RECORD").write_text("")
    print(f"{site}: {total / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
