"""Numba's compiler with a cache that follows changes of any kernel's source.

Numba outdates a cached function when the function's own file changes, not when that of a function it calls does, which
is compiled into it: after an update of some files the old code would run on. Here the cache lies in a folder named
after the contents of all files of this package.
"""

import contextlib
import functools
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from numba import config, njit

from sam.patching import Patch, put, register

register(
    {
        "save_by_key": Patch(
            owner="a numba.core.caching.IndexDataCacheFile",
            targets="save",
            cause="numba numbers the files by what the index holds: two processes that compile for different types at "
            "once take the same number, and the index may then name code for other types, for good.",
            can_go_when="Numba names files by their key.",
        )
    }
)
PACKAGE = Path(__file__).resolve().parent


def _cache_folder() -> str:
    """The first that can be written to: NUMBA_CACHE_DIR, this package's own, the temporary one."""
    sources = b"".join(file.read_bytes() for file in sorted(PACKAGE.rglob("*.py")))
    name = f"sam-{hashlib.sha256(sources).hexdigest()[:16]}"
    candidates = [PACKAGE / "__pycache__" / name, Path(tempfile.gettempdir()) / f"sam-{os.getuid()}" / name]
    if config.CACHE_DIR:
        candidates.insert(0, Path(config.CACHE_DIR) / name)
    for folder in candidates:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return str(folder)
    raise OSError(f"cannot write to {', '.join(map(str, candidates))}: set NUMBA_CACHE_DIR to a folder that can be")


CACHE_FOLDER = _cache_folder()


def compiled(function: Callable, **options) -> Callable:
    """numba.njit, cached in `CACHE_FOLDER`."""
    previous = config.CACHE_DIR
    config.CACHE_DIR = CACHE_FOLDER
    try:
        dispatcher = njit(cache=True, **options)(function)
    finally:
        config.CACHE_DIR = previous
    file = dispatcher._cache._cache_file
    put(file, "save", "save_by_key", functools.partial(_save, file))
    return dispatcher


def _save(file, key: tuple, data) -> None:
    """Save what was compiled for `key` (argument types, processor) in a file that no other key has.

    Two processes that compile for different types at once can at most drop an entry of the index.
    """
    name = file._data_name(int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:6]))
    file._save_data(name, data)
    file._save_index(file._load_index() | {key: name})


# As `compiled`; other threads go on while it runs.
compiled_for_threads = functools.partial(compiled, nogil=True)
# As `compiled`, for sums that may be added in any order, so that the processor adds several side by side. The order is
# the compiled code's: equal arrays have equal sums.
compiled_sum = functools.partial(compiled, fastmath={"reassoc"})
# As `compiled`, for functions that allocate no arrays: inlined where they are called, without reference counts, which
# make small functions that are given a NamedTuple of arrays three to eight times slower.
kernel = functools.partial(compiled, _nrt=False, forceinline=True)
# As `kernel`, for what is seldom called: a call, so that what calls it stays small.
rare_kernel = functools.partial(compiled, _nrt=False)
