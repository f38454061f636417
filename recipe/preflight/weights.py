"""`python -m recipe.preflight.weights FOLDER [--checksums]`: whether a model's weights are all there, to the last byte.

Every shard that model.safetensors.index.json names must exist, hold the tensors that the index says, and have the size
that its own header says: headers alone are read, so that 470 GB take seconds. --checksums reads all bytes and compares
them with the SHA-256 that `hf download` noted; ModelScope's client compares them itself while it downloads.
"""

import argparse
import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from recipe.preflight.problem import Problem
from sam.reading import ReadError, expect, json_object

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def find_problems(folder: Path) -> Iterator[Problem]:
    try:
        shards = _tensors_by_shard(folder / INDEX) if (folder / INDEX).exists() else {SINGLE: set()}
    except ReadError as error:
        yield Problem("model.damaged", str(error))
        return
    if missing := sorted(shard for shard in shards if not (folder / shard).is_file()):
        value = f"{folder}: {len(missing)} of {len(shards)} shards of {INDEX}, the first {missing[0]}"
        yield Problem("model.missing", value if shards[missing[0]] else f"{folder}: neither {INDEX} nor {SINGLE}")
        return
    for path, tensors in sorted((folder / shard, tensors) for shard, tensors in shards.items()):
        try:
            with safe_open(path, "np") as shard:  # compares the file's size with its header's
                lacking = sorted(tensors - set(shard.keys()))
        except (SafetensorError, OSError) as error:
            yield Problem("model.damaged", f"{path}, {path.stat().st_size:,} bytes: {error}")
            continue
        if lacking:
            value = f"{path}: {len(lacking)} tensors of {INDEX} are not in it, first {lacking[0]}"
            yield Problem("model.damaged", value, "fetch both again, bash scripts/prepare_model.sh")


def _tensors_by_shard(path: Path) -> dict[str, set[str]]:
    """Raises ReadError."""
    shards: dict[str, set[str]] = {}
    weights = json_object(path).get("weight_map")
    expect(isinstance(weights, dict) and bool(weights), f"{path}, weight_map", "tensors and their shards", weights)
    for tensor, shard in weights.items():
        expect(isinstance(shard, str) and bool(shard), f"{path}, weight_map, {tensor}", "the name of a shard", shard)
        shards.setdefault(shard, set()).add(tensor)
    return shards


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
