"""Read users' files: each function returns what a file holds, or raises a ReadError, one line that names file and place
and says what was expected."""

from __future__ import annotations

import io
import json
import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:
    import numpy as np  # arguments are read before it is installed

LARGEST_TOKEN = 2**31 - 1
NPY = b"\x93NUMPY"  # how a file of a single array begins
# By numpy's kind of a dtype: what its values are called, the kinds that are taken for them, and who knows its limits.
# A float is no integer, even a whole one: its NaN and its fractions would become other numbers in silence.
KINDS = {"i": ("integers", "iu", "iinfo"), "f": ("numbers", "iuf", "finfo"), "b": ("booleans", "biu", None)}
T = TypeVar("T")


class ReadError(ValueError):
    """A file is not what it should be; one line says where and what was expected."""


def expect(is_valid: bool, place: str, expected: str, got: Any) -> None:
    """Raise ReadError unless `is_valid`."""
    if not is_valid:
        raise ReadError(f"{place}: expected {expected}, got {reprlib.repr(got)}")


@contextmanager
def one_line(place: str, wrong: str) -> Iterator[None]:
    """Turn whatever a library raises into a ReadError: they raise dozens of kinds."""
    try:
        yield
    except (ReadError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Rust's among them
        raise ReadError(f"{place}: {wrong} ({' '.join(str(error).split()) or type(error).__name__})") from error


def json_object(path: Path) -> dict[str, Any]:
    """The object that a .json file holds."""
    return _parsed(content_of(path), str(path))


def json_rows(
    path: Path, read: Callable[[Any, str], T], left_out: list[str] | None = None, is_growing: bool = False
) -> Iterator[T]:
    r"""Each row of a .jsonl file as `read` of the row and its place, "FILE, line 3", gives it; blank lines are none.

    Args:
        left_out: takes the lines about rows that cannot be read; without it the first one is raised.
        is_growing: whether a last line without an end may be half a row, which is none.
    """
    lines = content_of(path).split(b"\n")  # str.splitlines cuts at U+2028 too, which may stand in a string
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            place = f"{path}, line {number}"
            row = read(_parsed(line, place), place)
        except ReadError as error:
            if is_growing and number == len(lines):
                continue
            if left_out is None:
                raise
            left_out.append(str(error))
        else:
            yield row


def parquet_rows(path: Path, read: Callable[[Any, str], T]) -> Iterator[T]:
    """As `json_rows`, of a Parquet file, of which a part is in memory at a time."""
    expect(path.is_file(), str(path), "a Parquet file", "none")
    with one_line(str(path), "not a Parquet file that can be read: pip install pyarrow, or write it as .jsonl"):
        from pyarrow import parquet

        batches = parquet.ParquetFile(path).iter_batches(1024)
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield read(row, f"{path}, row {number}")


def npz_arrays(content: Path | bytes, place: str) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, by whose checksums numpy itself does not go."""
    import numpy as np

    content = content_of(content) if isinstance(content, Path) else content
    if content.startswith(NPY):
        raise ReadError(f"{place}: expected an .npz file of arrays, got an .npy file of one array: use numpy.savez")
    with one_line(place, "not an .npz file of arrays"), np.load(io.BytesIO(content), allow_pickle=False) as archive:
        damaged = archive.zip.testzip()
        if damaged:
            raise ValueError(f"{damaged} is damaged")
        return {name: np.asarray(archive[name]) for name in archive.files}


class Values(NamedTuple):
    """What an array of a file must hold: what each value is, in which dtype, how many dimensions, and from which least
    value up to the dtype's largest; None: from its own."""

    what: str
    dtype: str
    dimensions: int = 1
    least: int | None = 0


TOKEN = Values("a token id", "int32")


def array_of(array: np.ndarray, place: str, wanted: Values) -> np.ndarray:
    """`array` in the wanted dtype; ReadError: it has other dimensions, is of another kind, or a value lies outside."""
    import numpy as np

    dtype = np.dtype(wanted.dtype)
    name, taken, limits_of = KINDS[dtype.kind]
    if array.ndim != wanted.dimensions or array.dtype.kind not in taken:
        got = f"{array.dtype} of shape {list(array.shape)}"
        raise ReadError(f"{place}: expected {wanted.dimensions}-dimensional {name}, got {got}")
    largest = getattr(np, limits_of)(dtype).max if limits_of else 1
    least = -largest if wanted.least is None else wanted.least
    with np.errstate(over="ignore"):
        values = array.astype(np.float64) if array.dtype.kind == "f" else array
    wrong = np.argwhere(~((values >= least) & (values <= largest)))  # NaN is neither
    if len(wrong):
        cell = wrong[0].tolist()
        expect(False, f"{place}{cell or ''}", f"{wanted.what}, {least} to {largest}", array[tuple(cell)].item())
    return array.astype(dtype)


def token_ids(values: Any, place: str) -> np.ndarray:
    """int32 [length] of a list of token ids, as JSON has it."""
    import numpy as np

    expect(isinstance(values, list), place, "a list of token ids", values)
    for number, token in enumerate(values):
        if type(token) is not int or not 0 <= token <= LARGEST_TOKEN:
            expect(False, f"{place}[{number}]", f"a token id, 0 to {LARGEST_TOKEN}", token)
    return np.array(values, dtype=np.int32)


def content_of(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise ReadError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ReadError(f"{path}: cannot be read ({error})") from error


def _parsed(content: bytes, place: str) -> dict[str, Any]:
    try:
        value = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise ReadError(f"{place}: not JSON ({error})") from error
    expect(isinstance(value, dict), place, "a JSON object", value)
    return value
