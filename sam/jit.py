"""Numba's compiler with a cache that follows changes of any kernel's source.

Numba outdates a cached function when the function's own file changes, not when that of a function it calls does, which
is compiled into it: after an update of some files the old code would run on. Here the cache lies in a folder named
after the contents of all files of this package.
"""

import functools
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from numba import config, njit

PACKAGE = Path(__file__).resolve().parent


def _fingerprint() -> str:
    sources = b"".join(file.read_bytes() for file in sorted(PACKAGE.rglob("*.py")))
    return hashlib.sha256(sources).hexdigest()[:16]


def _writable_folder() -> Path:
    """The first that can be written to: NUMBA_CACHE_DIR, this package's own, the temporary one."""
    name = f"sam-{_fingerprint()}"
    candidates = [PACKAGE / "__pycache__" / name, Path(tempfile.gettempdir()) / f"sam-{os.getuid()}" / name]
    if config.CACHE_DIR:
        candidates.insert(0, Path(config.CACHE_DIR) / name)
    for folder in candidates:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise OSError(
        f"none of {', '.join(map(str, candidates))} can be written to: set NUMBA_CACHE_DIR to a folder that can"
    )


CACHE_FOLDER = str(_writable_folder())


def compiled(function: Callable, **options) -> Callable:
    """numba.njit, cached in `CACHE_FOLDER`."""
    previous, config.CACHE_DIR = config.CACHE_DIR, CACHE_FOLDER
    try:
        dispatcher = njit(cache=True, **options)(function)
    finally:
        config.CACHE_DIR = previous
    file = dispatcher._cache._cache_file
    file.save = functools.partial(_save, file)
    return dispatcher


def _save(file, key: tuple, data) -> None:
    """Save what was compiled for `key` (argument types, processor) in a file that no other key has.

    Root cause: numba.core.caching.IndexDataCacheFile.save numbers the files by what the index holds. Two processes that
    compile for different types at once, as the first engines on a machine do, take the same number; the index may then
    name code for other types, in this run and all later ones. Here the processes can at most drop an entry of the
    index, which is then compiled again. Can go when Numba names files by their key.
    """
    name = file._data_name(int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:6]))
    file._save_data(name, data)
    file._save_index(file._load_index() | {key: name})


# As `compiled`; other threads go on while it runs.
compiled_for_threads = functools.partial(compiled, nogil=True)
# As `compiled`, for sums that may be added in any order, so that the processor adds several side by side. The order is
# the compiled code's: equal arrays have equal sums.
compiled_sum = functools.partial(compiled, fastmath={"reassoc"})
# As `compiled`, for functions that allocate no arrays: inlined where they are called, without reference counts. Numba
# counts a reference whenever an array is taken out of a tuple, which makes small functions that are given a NamedTuple
# of arrays three to eight times slower; and it passes each array as seven arguments, of which a call of a function that
# is not inlined puts dozens on the stack. Without either such a tuple costs nothing.
kernel = functools.partial(compiled, _nrt=False, forceinline=True)
# As `kernel`, for what is seldom called: a call, so that what calls it stays small.
rare_kernel = functools.partial(compiled, _nrt=False)
