#!/usr/bin/env bash
# A GPU machine without a network, to which files come 64 MiB at a time: an H100 or H200 (sm_90) with Python 3.12,
# PyTorch 2.11.0, Triton 3.6.0, numba, numpy and matplotlib. With a network, in the project's folder:
#   bash tests/gpu/pack.sh FOLDER    downloads the wheels of wheels.txt by the pins and hashes of requirements/cuda.txt,
#                                    fills FOLDER with part1, ... (PART_MIB each, 56) and manifest.json; ten minutes
#   mkdir -p .kit && cp FOLDER/manifest.json FOLDER/part1 .kit/    is brought beside the repository and recordings
# There, in the project's folder; /tmp has to last from call to call, $OUT is the folder whose files come back:
#   python3 tests/gpu/unpack.py .kit && PYTHONPATH=/tmp/site:. python3 tests/gpu/check.py
#   PYTHONPATH=/tmp/site:. python3 -m tests.gpu.kernel RECORDING...
#   ROUNDS=1 REQUESTS="1 16" bash tests/gpu/table.sh tiny 400
#   bash tests/gpu/table.sh 8b 590    the same again goes on where it ended
# No part carries FlashInfer, FlashAttention 2, DeepGEMM's headers, kernels of experts, other chips' device code: a
# mixture of experts, fp8 or an older chip needs the whole wheel.
set -euo pipefail
kit="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
[ $# -eq 1 ] || { echo "usage: bash pack.sh FOLDER (in the project's folder)" >&2; exit 2; }
pins="${PINS:-requirements/cuda.txt}"
[ -f "$pins" ] || { echo "error: no $pins here: run it in the project's folder, or set PINS" >&2; exit 2; }
mkdir -p "$1/wheels"
folder="$(realpath "$1")"
python3 - "$kit/wheels.txt" "$pins" >"$folder/requirements.txt" <<'PYTHON'
import re, sys
names = [line.strip() for line in open(sys.argv[1]) if line.strip() and not line.startswith("#")]
blocks = re.split(r"\n(?=[a-zA-Z0-9])", "\n" + open(sys.argv[2]).read())
blocks = {match[0].lower(): block for block in blocks if (match := re.match(r"[a-zA-Z0-9][a-zA-Z0-9._-]*", block))}
if missing := [name for name in names if name not in blocks]:
    sys.exit(f"error: {sys.argv[2]} does not pin {' '.join(missing)}")
for name in names:
    lines = [line for line in blocks[name].splitlines() if not line.lstrip().startswith("#")]
    print("\n".join(lines).rstrip().rstrip("\\").rstrip())
PYTHON
platforms=()
for glibc in $(seq 39 -1 5); do platforms+=(--platform "manylinux_2_${glibc}_x86_64"); done
for name in manylinux2014 manylinux2010 manylinux1; do platforms+=(--platform "${name}_x86_64"); done
python3 -m pip download --quiet --require-hashes --no-deps --only-binary :all: "${platforms[@]}" \
    --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none \
    --dest "$folder/wheels" -r "$folder/requirements.txt"
python3 "$kit/tree.py" "$folder/wheels" "$folder/site"
# Like files side by side: they compress better.
(cd "$folder/site" && find . -type f | awk -F. '{print $NF "\t" $0}' | LC_ALL=C sort | cut -f2- |
    tar --create --no-recursion --owner=0 --group=0 --mtime=@0 --files-from=-) | xz -6 -T2 >"$folder/site.tar.xz"
rm -f "$folder"/part*
python3 - "$folder" "${PART_MIB:-56}" <<'PYTHON'
import hashlib, json, pathlib, sys
folder, size = pathlib.Path(sys.argv[1]), int(float(sys.argv[2]) * 2**20)
content = (folder / "site.tar.xz").read_bytes()
count = -(-len(content) // size)
parts = {}
for number in range(count):
    part = content[number * size : (number + 1) * size]
    (folder / f"part{number + 1}").write_bytes(part)
    parts[f"part{number + 1}"] = {"bytes": len(part), "sha256": hashlib.sha256(part).hexdigest()}
wheels = sorted(wheel.name for wheel in (folder / "wheels").glob("*.whl"))
whole = {"sha256": hashlib.sha256(content).hexdigest(), "parts": parts, "wheels": wheels}
(folder / "manifest.json").write_text(json.dumps(whole, indent=1) + "\n")
for name, part in parts.items():
    print(f"{name} {part['bytes'] / 2**20:.1f} MiB {part['sha256'][:12]}")
PYTHON
rm -rf "$folder/site" "$folder/site.tar.xz"
echo "bring $folder/manifest.json and part1 ...; on the GPU machine: python3 tests/gpu/unpack.py THEIR_FOLDER"
