"""`sam corpus build INPUT -o corpus.sam`: a static automaton of texts known beforehand.

As in SAM-Decoding (Hu et al., 2024): rollouts of an earlier run, for example. A drafter maps it, a folder of .npy
files, into memory, shares it with the other processes of the machine, never changes it, and drafts from it where its
match is longer than the group's by a margin. Inputs are recordings as `sam.replay` reads them, or JSONL rows with token
ids under `tokens`.
"""

import json
import os
import shutil
import sys
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from sam.automaton.store import BLOCK_BYTES, BLOCK_NODES, Store, add_group, blocks_for, extend_all, make_store, reserve
from sam.command import Parser, run_command
from sam.reading import ReadError, json_object, json_rows, token_ids
from sam.record.responses import read_recording

FORMAT = 2  # 1 was a single file
HEADER = "header.json"


def corpus_of(texts: Iterable[np.ndarray] = (), num_tokens: int = 0) -> Store:
    """A store with one automaton, group 0, whose root is node 0, of `texts` (int32 [length]) with so many tokens."""
    store = make_store(blocks_for(num_tokens))
    root = add_group(store, 0)
    reserve(store, 0, num_tokens)
    for text in texts:
        extend_all(store, 0, root, text)
    return store


def save_corpus(store: Store, path: Path) -> None:
    """Write a corpus for `load_corpus`. A complete one replaces that of an earlier build.

    Raises:
        ValueError: `path` is a folder of something else.
    """
    if path.is_dir() and not (path / HEADER).is_file():
        raise ValueError(f"{path}: a folder that is no corpus; choose another path")
    counters = store.counters[0]
    blocks = int(counters["num_touched_blocks"])
    used = Store(
        nodes=store.nodes[: blocks * BLOCK_NODES],
        hash_buckets=store.hash_buckets[: int(counters["num_buckets"])],
        groups=store.groups[:blocks],
        blocks=store.blocks[:blocks],
        counters=store.counters,
    )
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    # As bytes: .npy has no name for a type with overlapping fields.
    contents = {name: array.view(np.uint8) for name, array in used._asdict().items()}
    for name, content in contents.items():
        np.save(partial / f"{name}.npy", content)
    checksums = {name: zlib.crc32(content) for name, content in contents.items()}
    (partial / HEADER).write_text(json.dumps({"format": FORMAT, "crc32": checksums}))
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    partial.rename(path)


def load_corpus(path: Path) -> Store:
    """Map a saved corpus. Processes that load it share its memory; it can be drafted from, not extended.

    Raises:
        ValueError: no such path, not one of `save_corpus`, or a damaged one.
    """
    if not path.exists():
        raise ValueError(f"{path}: no such file; build it with sam corpus build")
    try:
        header = json_object(path / HEADER)
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']}")
        types = {name: array.dtype for name, array in corpus_of()._asdict().items()}
        return Store(**{name: _map(path / f"{name}.npy", types[name], header["crc32"][name]) for name in types})
    except (ValueError, KeyError, TypeError, OSError, EOFError) as error:
        raise ValueError(f"{path}: damaged or not an automaton; build it again with sam corpus build") from error


def _map(path: Path, dtype: np.dtype, checksum: int) -> np.ndarray:
    # Copy on write: pages are shared between processes, and kernels see the same type as of a live store.
    content = np.load(path, mmap_mode="c")
    if content.dtype != np.uint8 or zlib.crc32(content) != checksum:
        raise ValueError(f"{path}: another type or checksum")
    return content.view(np.ndarray).view(dtype)


def read_texts(path: Path, tokenizer: str | None) -> Iterator[np.ndarray]:
    """The token ids of each text: rows of `tokens`, or a recording's responses, each after its prompt.

    Raises:
        ReadError: not a file of either kind.
    """
    if path.suffix == ".jsonl" and "tokens" in next(json_rows(path, lambda row, _: row), {}):
        yield from json_rows(path, lambda row, place: token_ids(row.get("tokens"), f"{place}, tokens"))
        return
    recording = read_recording(path, tokenizer)
    for prompt, responses in zip(recording.prompts, recording.responses, strict=True):
        for response in responses:
            yield np.concatenate([prompt, response])


def build(inputs: list[Path], output: Path, tokenizer: str | None = None) -> int:
    """Build the automaton of all texts and save it; returns the number of their tokens.

    Raises:
        ReadError: an input cannot be read, or none has a token.
        ValueError: the memory of the machine is too small for the texts.
    """
    texts = [text for path in inputs for text in read_texts(path, tokenizer) if len(text)]
    total = sum(len(text) for text in texts)
    if not total:
        raise ReadError(f"{', '.join(map(str, inputs))}: no token in any text")
    needed, available = blocks_for(total) * BLOCK_BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > available:
        raise ValueError(f"{total} tokens need {needed >> 20} MiB of memory, this machine has {available >> 20}")
    save_corpus(corpus_of(tqdm(texts, unit="text", desc=output.name), total), output)
    return total


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="sam corpus", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("build", help="build an automaton from texts")
    command.add_argument("inputs", nargs="+", type=Path, help=".jsonl or .npz")
    command.add_argument("-o", "--output", type=Path, required=True)
    command.add_argument("--tokenizer", help="for verl's dumps of text: folder or name of the tokenizer")
    options = parser.parse_args(arguments)

    def built() -> Iterator[str]:
        tokens = build(options.inputs, options.output, options.tokenizer)
        size = sum(file.stat().st_size for file in options.output.iterdir())
        yield f"{options.output}: {tokens} tokens, {size >> 10} KiB"
        yield f"use it with speculation.corpus={options.output.resolve()}"

    return run_command(built)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
