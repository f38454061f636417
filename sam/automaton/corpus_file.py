"""An automaton of fixed texts in a folder of .npy files, mapped into memory by the processes that draft from it."""

import json
import shutil
import zlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from sam.automaton.store import BLOCK_NODES, Store, add_group, blocks_for, make_store, reserve
from sam.automaton.suffix_automaton import extend_all
from sam.reading import json_object

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
