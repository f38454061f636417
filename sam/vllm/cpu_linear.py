"""A matrix product on a CPU whose rows are the same to the bit in any batch.

Every element is a dot product in one order: LANES sums side by side by fused multiply-add, these by pairs, then what is
left over. How many elements are computed at once, and by which thread, changes none. Weights are read where they lie.
"""

import ctypes
import functools
import time
from collections.abc import Callable

import numpy as np
import torch
from llvmlite import binding, ir
from numba import carray, cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

from sam.jit import compiled

FEATURES = binding.get_host_cpu_features()
KERNEL = next((name for name in ("avx512f", "avx2", "neon") if FEATURES.get(name)), "no vectors known")
LANES = 16 if KERNEL == "avx512f" else 8
# A tile of the result, whose sums stay in registers: AVX2 has 16, AVX-512 32.
ROWS = 6 if KERNEL == "avx512f" else 3
COLUMNS = 4
ROW_BLOCK_BYTES = 1 << 18  # of rows that stay in a core's second cache while weights pass by
COLUMN_BLOCK = 128  # most that a thread takes at once
ALONE = 1 << 17  # multiplications for which a second thread would come too late
INT = ir.IntType(64)
FLOAT = ir.FloatType()
# By a weight's dtype a value of numba's type, which has no bfloat16.
ELEMENTS = {torch.float32: np.float32(0), torch.bfloat16: np.uint16(0)}
FIELDS = "next_block x weight result rows columns inner weight_stride row_block column_block".split()
JOB = np.dtype([(name, np.int64) for name in FIELDS])
Job = ctypes.c_int64 * len(FIELDS)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear`: x [..., inner], weight [columns, inner], bias [columns]; returns [..., columns],
    summed in float32 and rounded once."""
    weight = weight.detach()  # vLLM's parameters are of a class whose every attribute takes microseconds
    columns, inner = weight.shape
    if weight.dtype not in ELEMENTS or weight.stride(1) != 1:
        weight = weight.float().contiguous()
    is_plain = x.dim() == 2 and x.dtype == torch.float32
    rows = (x if is_plain else x.reshape(-1, inner).float()).contiguous()
    count = rows.shape[0]
    result = torch.empty((count, columns), dtype=torch.float32)
    row_block = max(1, ROW_BLOCK_BYTES // (4 * inner * ROWS)) * ROWS
    column_block = min(COLUMN_BLOCK, columns // 32 * COLUMNS + COLUMNS)
    places = rows.data_ptr(), weight.data_ptr(), result.data_ptr()
    job = Job(0, *places, count, columns, inner, weight.stride(0) * weight.itemsize, row_block, column_block)
    _parallel()(_worker(weight.dtype), job, count * columns * inner < ALONE, 0)  # 0 threads: as many as torch's
    if bias is not None:
        result += bias
    return result if is_plain else result.to(x.dtype).view(*x.shape[:-1], columns)


def cost(weight: torch.Tensor, rows: int, other: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """The least time of `linear` over that of `other`, a product of the same weight; they take turns."""
    x = torch.randn(rows, weight.shape[1]).to(weight.dtype)
    products = (lambda: linear(x, weight), lambda: other(x))
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(20):
        start = time.perf_counter()
        products[turn % 2]()
        seconds[turn % 2].append(time.perf_counter() - start)
    return min(seconds[0]) / min(seconds[1])


@functools.cache
def _parallel():
    """GOMP_parallel of torch's OpenMP runtime, whose threads are awake; without one the caller alone."""
    parallel = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if parallel is None:
        return lambda worker, job, *_: ctypes.CFUNCTYPE(None, ctypes.c_void_p)(worker)(ctypes.addressof(job))
    parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    parallel.restype = None
    return parallel


@functools.cache
def _worker(dtype: torch.dtype) -> int:
    """Address of a C function that works on a job; compiled at the first use."""
    element = ELEMENTS[dtype]
    return cfunc("void(voidptr)")(lambda job: _work(job, element)).address


@intrinsic
def _take(typing, job):
    """A job's next block, which no other thread gets."""
    counter = lambda builder, job: builder.bitcast(job, INT.as_pointer())  # noqa: E731
    return types.int64(job), lambda context, builder, signature, arguments: builder.atomic_rmw(
        "add", counter(builder, *arguments), INT(1), "monotonic"
    )


def _tile(rows: int, columns: int):
    """A compiled function that computes so many elements at once: of a type of ELEMENTS, and the addresses of x, weight
    and result, their strides in bytes, inner."""

    def generate(context, builder, signature, arguments):
        x, weight, result, x_stride, weight_stride, result_stride, inner = cgutils.unpack_tuple(builder, arguments[1])
        move = lambda start, stride, steps: builder.add(start, builder.mul(stride, INT(steps)))  # noqa: E731
        tile = [(row, column) for column in range(columns) for row in range(rows)]
        sums = dict.fromkeys(tile, ir.Constant(ir.VectorType(FLOAT, LANES), None))
        whole = builder.and_(inner, INT(-LANES))
        for start, stop, lanes in ((INT(0), whole, LANES), (whole, inner, 1)):
            vector = ir.VectorType(FLOAT, lanes)
            kind = ir.FunctionType(vector, [vector] * 3)
            fuse = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{lanes}f32")
            kept = {place: cgutils.alloca_once_value(builder, total) for place, total in sums.items()}
            with cgutils.for_range_slice(builder, start, stop, INT(lanes), INT) as (place, _):
                load = functools.partial(_load, builder, place, lanes)
                values = [load(move(x, x_stride, row), types.float32) for row in range(rows)]
                weights = [load(move(weight, weight_stride, column), signature.args[0]) for column in range(columns)]
                for row, column in tile:
                    total = builder.call(fuse, [values[row], weights[column], builder.load(kept[row, column])])
                    builder.store(total, kept[row, column])
            sums = {place: _by_pairs(builder, builder.load(total)) for place, total in kept.items()}
        for (row, column), total in sums.items():
            address = builder.add(move(result, result_stride, row), INT(4 * column))
            builder.store(total, builder.inttoptr(address, total.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return intrinsic(lambda typing, element, places: (types.void(element, places), generate))


def _load(builder, place, lanes: int, address, element):
    """A vector of the elements from `place` on, as float32."""
    size = element.bitwidth // 8
    bits = ir.VectorType(ir.IntType(32), lanes)
    stored = ir.VectorType(FLOAT if size == 4 else ir.IntType(16), lanes)
    start = builder.add(address, builder.mul(place, INT(size)))
    value = builder.load(builder.inttoptr(start, stored.as_pointer()), align=size)
    if size == 4:
        return value
    value = builder.shl(builder.zext(value, bits), ir.Constant(bits, [16] * lanes))
    return builder.bitcast(value, ir.VectorType(FLOAT, lanes))


def _by_pairs(builder, vector):
    """The sum of a vector's lanes, as a vector of one."""
    while (half := vector.type.count // 2) > 0:
        lanes = [ir.Constant(ir.VectorType(ir.IntType(32), half), [*range(start, start + half)]) for start in (0, half)]
        unused = ir.Constant(vector.type, ir.Undefined)
        vector = builder.fadd(*(builder.shuffle_vector(vector, unused, part) for part in lanes))
    return vector


TILE, ROW, COLUMN, ELEMENT = (_tile(*size) for size in ((ROWS, COLUMNS), (1, COLUMNS), (ROWS, 1), (1, 1)))


@compiled
def _work(address, element):
    """Compute block after block of the result until none is left.

    The first rows go column by column, so that weights come from memory in one stream; the others find them in the
    cache.
    """
    job = carray(address, 1, JOB)[0]
    across = -(-job.columns // job.column_block)
    blocks = across * -(-job.rows // job.row_block)
    block = _take(address)
    while block < blocks:
        left = block % across * job.column_block
        top = block // across * job.row_block
        right = min(left + job.column_block, job.columns)
        bottom = min(top + job.row_block, job.rows)
        for first in range(left, right, COLUMNS):
            row = top
            while row < bottom:
                height = ROWS if bottom - row >= ROWS else 1
                width = 1 if row == top or right - first < COLUMNS else COLUMNS
                for column in range(first, min(first + COLUMNS, right), width):
                    places = (
                        job.x + 4 * job.inner * row,
                        job.weight + job.weight_stride * column,
                        job.result + 4 * (job.columns * row + column),
                        4 * job.inner, job.weight_stride, 4 * job.columns, job.inner,
                    )  # fmt: skip
                    if width > 1 and height > 1:
                        TILE(element, places)
                    elif width > 1:
                        ROW(element, places)
                    elif height > 1:
                        COLUMN(element, places)
                    else:
                        ELEMENT(element, places)
                row += height
        block = _take(address)
