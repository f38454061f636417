"""`python -m recipe.preflight.weights FOLDER [--checksums]`: whether a model's weights are all there, to the last byte.

Every shard that model.safetensors.index.json names must exist, hold the tensors that the index says, and have the size
that its own header says: headers alone are read, so that 470 GB take seconds. --checksums reads all bytes and compares
them with the SHA-256 that `hf download` noted; ModelScope's client compares them itself while it downloads.
"""

import argparse
import hashlib
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from recipe.preflight.problem import Problem
from sam.reading import ReadError, expect, json_object

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def find_problems(folder: Path) -> Iterator[Problem]:
    shards: dict[str, set[str]] = {}
    total = None
    if not (folder / INDEX).exists():
        shards[SINGLE] = set()
    else:
        try:
            total = _read_index(folder / INDEX, shards)
        except ReadError as error:
            yield Problem("model.damaged", str(error))
            return
    if missing := sorted(shard for shard in shards if not (folder / shard).is_file()):
        value = f"{folder}: {len(missing)} of {len(shards)} shards of {INDEX}, the first {missing[0]}"
        yield Problem("model.missing", value if shards[missing[0]] else f"{folder}: neither {INDEX} nor {SINGLE}")
        return
    sizes: dict[str, int] = {}
    found = [problem for shard in sorted(shards) for problem in _shard_problems(folder / shard, shards[shard], sizes)]
    yield from found
    if not found and total is not None and (there := sum(sizes.values())) != total:
        yield Problem("model.index", f"{folder}: {there} bytes of tensors, {INDEX} says {total}")


def _read_index(path: Path, shards: dict[str, set[str]]) -> int | None:
    """Adds to `shards` the tensors of each, and returns the bytes of all, if the index says so."""
    index = json_object(path)
    weights, about = index.get("weight_map"), index.get("metadata") or {}
    expect(isinstance(weights, dict) and bool(weights), f"{path}, weight_map", "tensors and their shards", weights)
    for tensor, shard in weights.items():
        expect(isinstance(shard, str) and bool(shard), f"{path}, weight_map, {tensor}", "the name of a shard", shard)
        shards.setdefault(shard, set()).add(tensor)
    expect(isinstance(about, dict), f"{path}, metadata", "a JSON object", about)
    total = about.get("total_size")
    is_whole = total is None or (type(total) in (int, float) and total >= 0 and total == total // 1)
    expect(is_whole, f"{path}, metadata.total_size", "a number of bytes", total)
    return total


def _shard_problems(path: Path, tensors: set[str], sizes: dict[str, int]) -> Iterator[Problem]:
    """Also adds to `sizes` the bytes of those tensors. Opening compares the file's size with its header's."""
    try:
        with safe_open(path, "np") as shard:
            missing = sorted(tensors - set(shard.keys()))
            slices = {name: shard.get_slice(name) for name in tensors.difference(missing)}
            sizes.update({name: _bytes(one.get_shape(), one.get_dtype()) for name, one in slices.items()})
    except (SafetensorError, OSError) as error:
        yield Problem("model.damaged", f"{path}, {path.stat().st_size:,} bytes: {error}")
        return
    if missing:
        yield Problem("model.index", f"{path}: {len(missing)} tensors of {INDEX} are not in it, first {missing[0]}")


def _bytes(shape: list[int], dtype: str) -> int:
    """`dtype` as safetensors names it: F32, BF16, F8_E4M3, BOOL."""
    bits = re.search(r"\d+", dtype)
    return math.prod(shape) * (int(bits[0]) if bits else 8) // 8


def checksum_problems(folder: Path) -> Iterator[Problem]:
    """Compares files with what `hf download --local-dir` noted: the SHA-256 of each large file."""
    noted = sorted((folder / ".cache" / "huggingface" / "download").glob("*.metadata"))
    digests = {path.name.removesuffix(".metadata"): path.read_bytes().splitlines()[1:2] for path in noted}
    known = {name: one[0].decode() for name, one in digests.items() if one and re.fullmatch(b"[0-9a-f]{64}", one[0])}
    if not known:
        yield Problem("model.checksum", f"{folder}: no checksums there", "only `hf download` leaves them")
    for name, wanted in known.items():
        if not (path := folder / name).is_file():
            continue  # find_problems says so where it matters
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != wanted:
            yield Problem("model.checksum", f"{path}: {found[:12]}..., downloaded was {wanted[:12]}...")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipe.preflight.weights", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--checksums", action="store_true", help="also read every byte")
    options = parser.parse_args(arguments)
    problems = list(find_problems(options.folder))
    if options.checksums and not problems:
        problems = list(checksum_problems(options.folder))
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if not problems:
        size = sum(path.stat().st_size for path in options.folder.glob("*.safetensors"))
        print(f"{options.folder}: complete, {size / 1e9:.1f} GB of weights")
    return 2 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
