"""Numbers of rows for which a matrix product's rows are the same to the bit, on this machine.

Matrix libraries choose a kernel by the number of rows, which speculation changes, and kernels add in different orders.
Which numbers agree is found by comparing once, with fixed inputs and without a clock: without the file all find the
same.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import torch

from sam.config import CACHE

CACHE_FOLDER = CACHE / "cpu_row_classes"
BLOCK = 64  # rows that others are compared with
# Every number up to two blocks: some numbers between 64 and 96 have an order of adding of their own in oneDNN for AVX2.
COUNTS = (*range(1, 130), 143, 177, 209, 241, *range(255, 258), 300, 384, 445, 511, 512, 777, 1024, 2048, 4096, 8192)
# Of the largest product compared: a vocabulary of 150,000 tokens takes some ten seconds in all.
MOST_OPERATIONS = 2e10
Product = Callable[[torch.Tensor], torch.Tensor]


class RowClass(NamedTuple):
    """From `smallest` to `largest` rows, each is the same to the bit, wherever it stands."""

    smallest: int
    largest: int


def multiply(product: Product, rows: torch.Tensor, row_class: RowClass, multiple: int = 1) -> torch.Tensor:
    """`product(rows)`, called with numbers of rows of the class only: few are padded with zeros, many are cut up. More
    than `multiple` are padded to multiples of it, which are fewer different numbers."""
    count, (smallest, largest) = len(rows), row_class
    if count > largest:
        return torch.cat([multiply(product, piece, row_class, multiple) for piece in rows.split(largest)])
    wanted = max(smallest, count if count <= multiple else min(-(-count // multiple) * multiple, largest))
    if wanted == count:
        return product(rows)
    return product(torch.cat((rows, rows.new_zeros(wanted - count, rows.shape[1]))))[:count]


def rounding_sensitive(rows: int, inner: int, dtype: torch.dtype, seed: int, sign: int = 1) -> torch.Tensor:
    """[rows, inner] normal numbers whose second half is the first, shuffled, times `sign`. Their products with rows of
    the other sign sum up to zero: what comes out is rounding alone, and shows in which order a kernel adds."""
    values = torch.randn(rows, inner, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    half = inner // 2
    order = torch.randperm(half, generator=torch.Generator().manual_seed(0))
    values[:, half : 2 * half] = sign * values[:, order]
    values[:, 2 * half :] = 0.0
    return values.to(dtype)


def find_row_class(products: Sequence[Product], columns: int, inner: int, dtype: torch.dtype) -> RowClass | None:
    """The numbers of rows around 64 that agree with blocks of 64 rows; None if blocks do not agree among themselves.

    Args:
        products: functions of [rows, inner] with results [rows, columns], by weights that are `rounding_sensitive`
            with sign -1, and a bias no larger than their rounding; the class holds for each.
    """
    affordable = max(BLOCK, int(MOST_OPERATIONS / (2 * columns * inner)))
    counts = [count for count in COUNTS if count <= affordable]
    inputs = rounding_sensitive((counts[-1] // BLOCK + 2) * BLOCK, inner, dtype, seed=0)
    expected = [torch.cat([product(piece) for piece in inputs.split(BLOCK)]) for product in products]

    def agrees(count: int) -> bool:
        # Not from a block's start, so that rows change their place too.
        part = slice(start := 5 * count % 59 + 1, start + count)
        results = zip(products, expected, strict=True)
        return all(torch.equal(product(inputs[part]), rows[part]) for product, rows in results)

    if not agrees(BLOCK):
        return None
    fewer = reversed([count for count in counts if count < BLOCK])
    more = [count for count in counts if count > BLOCK]
    return RowClass(min([BLOCK, *takewhile(agrees, fewer)]), max([BLOCK, *takewhile(agrees, more)]))


def known_or_found(name: str, find: Callable[[], RowClass | None]) -> RowClass | None:
    """The class kept for `name` on this machine, or what `find` returns, which is kept."""
    key = f"{name} {_machine(torch.get_num_threads())}"
    path = CACHE_FOLDER / hashlib.sha256(key.encode()).hexdigest()[:32]
    with contextlib.suppress(OSError, ValueError, TypeError):
        return (kept := json.loads(path.read_bytes())) and RowClass(*kept)
    found = find()
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(found))  # half of it is no JSON
    return found


@functools.cache
def _machine(threads: int) -> str:
    """What the libraries choose their kernels by: processor, versions, threads, and their own switches."""
    from vllm import __version__ as vllm_version

    processor = []
    with contextlib.suppress(OSError):
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
        processor = re.findall(r"^(?:model|cpu family|stepping|flags|Features|CPU )[^:]*:.*$", first, re.M)
    switches = [f"{name}={value}" for name, value in sorted(os.environ.items()) if re.match("MKL_|ONEDNN_|DNNL_", name)]
    return "\n".join([*processor, torch.__version__, vllm_version, str(threads), *switches, Path(__file__).read_text()])
