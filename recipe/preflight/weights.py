"""`python -m recipe.preflight.weights FOLDER [--checksums]`: whether a model's weights are all there, to the last byte.

Every shard that model.safetensors.index.json names must exist, hold the tensors that the index says, and have the size
that its own header says: headers alone are read, so that 470 GB take seconds. --checksums reads all bytes and compares
them with the SHA-256 that `hf download` noted; ModelScope's client compares them itself while it downloads.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

from recipe.preflight.problem import Problem

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
FETCH = "bash scripts/prepare_model.sh goes on where a download stopped"
LONGEST_HEADER = 100_000_000  # safetensors' own limit


def find_problems(folder: Path) -> Iterator[Problem]:
    if not (folder / INDEX).is_file():
        if (folder / SINGLE).is_file():
            yield from _shard_problems(folder / SINGLE, None)
        else:
            yield Problem("model.missing", f"{folder}: neither {INDEX} nor {SINGLE} there: {FETCH}")
        return
    try:
        index = json.loads((folder / INDEX).read_text())
        shards: dict[str, set[str]] = {}
        for tensor, shard in index["weight_map"].items():
            shards.setdefault(shard, set()).add(tensor)
    except (ValueError, KeyError, AttributeError, TypeError):
        yield Problem("model.damaged", f"{folder / INDEX}: not an index of safetensors: remove it, {FETCH}")
        return
    if missing := sorted(shard for shard in shards if not (folder / shard).is_file()):
        count = f"{len(missing)} of {len(shards)}"
        yield Problem(
            "model.missing", f"{folder}: {count} shards of {INDEX} are missing, the first {missing[0]}: {FETCH}"
        )
        return
    found = [problem for shard in sorted(shards) for problem in _shard_problems(folder / shard, shards[shard])]
    yield from found
    total = (index.get("metadata") or {}).get("total_size")
    if not found and total is not None and (there := _tensor_bytes(folder, shards)) != int(total):
        yield Problem(
            "model.index",
            f"{folder}: the shards hold {there} bytes of tensors, {INDEX} says {int(total)}: another model's index?",
        )


def _shard_problems(path: Path, tensors: set[str] | None) -> Iterator[Problem]:
    try:
        header, start = read_header(path)
    except ValueError as error:
        yield Problem("model.damaged", f"{path}: {error}: remove it, {FETCH}")
        return
    wanted, there = start + _end(header), path.stat().st_size
    if there != wanted:
        yield Problem(
            "model.damaged", f"{path} has {there:,} bytes of {wanted:,}, an interrupted copy: remove it, {FETCH}"
        )
    if tensors is not None and (missing := sorted(tensors - set(header))):
        yield Problem(
            "model.index",
            f"{path}: {len(missing)} tensors of {INDEX} are not in it, the first {missing[0]}: files of two models?",
        )


def read_header(path: Path) -> tuple[dict, int]:
    """A safetensors file's header and where its tensors start. Raises ValueError: it is none."""
    with open(path, "rb") as file:
        first = file.read(8)
        size = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 0 < size <= LONGEST_HEADER:
            raise ValueError("no safetensors file")
        text = file.read(size)
    try:
        header = json.loads(text)
        _end(header)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ValueError("its header is damaged") from None
    return header, 8 + size


def _end(header: dict) -> int:
    return max((one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"), default=0)


def _tensor_bytes(folder: Path, shards: dict[str, set[str]]) -> int:
    headers = {shard: read_header(folder / shard)[0] for shard in shards}
    spans = [headers[shard][tensor]["data_offsets"] for shard, tensors in shards.items() for tensor in tensors]
    return sum(end - start for start, end in spans)


def checksum_problems(folder: Path) -> Iterator[Problem]:
    """Compares files with what `hf download --local-dir` noted: the SHA-256 of each large file."""
    noted = sorted((folder / ".cache" / "huggingface" / "download").glob("*.metadata"))
    digests = {path.name.removesuffix(".metadata"): path.read_text().splitlines()[1:2] for path in noted}
    known = {name: one[0] for name, one in digests.items() if one and re.fullmatch("[0-9a-f]{64}", one[0])}
    if not known:
        yield Problem(
            "model.checksum",
            f"{folder}: no checksums there: only `hf download` leaves them, see scripts/prepare_model.sh",
        )
    for name, wanted in known.items():
        if not (path := folder / name).is_file():
            continue  # find_problems says so where it matters
        with open(path, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != wanted:
            yield Problem(
                "model.checksum",
                f"{path}: its SHA-256 is {found[:12]}..., downloaded was {wanted[:12]}...: remove it, {FETCH}",
            )


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
