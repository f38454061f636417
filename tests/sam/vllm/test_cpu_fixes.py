"""Linear layers on a CPU: rows that do not depend on the batch, computed once each. Weight syncs and graphs are in
tests/sam/engine."""

import ctypes
import itertools
from collections import Counter
from types import SimpleNamespace

import numba
import numpy as np
import pytest
import torch
from vllm import _custom_ops as ops

from sam.config import SpeculationConfig
from sam.vllm import cpu_fixes, cpu_linear

SHAPES = [(277, 577), (128, 128), (3, 40), (64, 1536)]
LANES, ROWS, COLUMNS = cpu_linear.LANES, cpu_linear.ROWS, cpu_linear.COLUMNS


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_layer(shape, dtype=torch.float32, bias=False):
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(random(*shape, dtype=dtype) * 0.05, requires_grad=False)
    layer.bias = torch.nn.Parameter(random(shape[0], dtype=dtype, seed=1), requires_grad=False) if bias else None
    cpu_fixes.attach(layer, remove_weight=True)
    return layer


def apply(layer, x):
    """As vllm.model_executor.layers.utils.cpu_unquantized_gemm."""
    return layer.cpu_linear(x, layer.weight, layer.bias)


@pytest.fixture
def threads():
    """Sets how many torch has; the number of before afterwards."""
    before = torch.get_num_threads()
    yield torch._C.set_num_threads  # vLLM has emptied the public one
    torch._C.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("shape", "bias"), [(shape, shape[0] % 2 == 1) for shape in SHAPES], ids=str)
def test_rows_depend_neither_on_their_number_nor_on_their_place_nor_on_threads(shape, bias, dtype, threads):
    layer = make_layer(shape, dtype, bias)
    x = random(300, shape[1], dtype=dtype, seed=2)
    whole = apply(layer, x)
    for count in (*range(1, 130), 256):
        threads(1 + count % 3)
        start = 7 * count % (300 - count)
        assert torch.equal(apply(layer, x[start : start + count]), whole[start : start + count]), count
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, layer.weight, layer.bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_element_is_a_sum_of_all_its_products_in_the_order_that_is_said(shape, dtype):
    """Fused multiply-adds of float32 are those of float64, rounded: a product of two float32 is exact there."""
    layer, x = make_layer(shape, dtype), random(5, shape[1], dtype=dtype)
    factors = x[:, None].double(), layer.weight[None].double()
    whole = shape[1] // LANES * LANES
    sums = torch.zeros(5, shape[0], LANES)
    for start in range(0, whole, LANES):
        products = factors[0][..., start : start + LANES] * factors[1][..., start : start + LANES]
        sums = (sums.double() + products).float()
    while (half := sums.shape[-1] // 2) > 0:
        sums = sums[..., :half] + sums[..., half:]
    sums = sums[..., 0]
    for place in range(whole, shape[1]):
        sums = (sums.double() + factors[0][..., place] * factors[1][..., place]).float()
    assert torch.equal(apply(layer, x), sums.to(dtype))


@pytest.mark.parametrize("columns", [1, COLUMNS, 2 * COLUMNS + 1, 5 * cpu_linear.COLUMN_BLOCK])
@pytest.mark.parametrize("rows", [1, 2, ROWS, ROWS + 2, 5 * ROWS + 1, 64, 96, 2000])
def test_no_row_is_padded_and_every_element_is_computed_once(rows, columns, monkeypatch):
    x, weight, computed, blocks = random(rows, 300), random(columns, 300), Counter(), itertools.count()

    def counted(height, width):
        def tile(element, places):
            result, row_stride = places[2], places[5]
            computed.update(result + row_stride * row + 4 * column for row in range(height) for column in range(width))

        return tile

    for name, size in {"TILE": (ROWS, COLUMNS), "ROW": (1, COLUMNS), "COLUMN": (ROWS, 1), "ELEMENT": (1, 1)}.items():
        monkeypatch.setattr(cpu_linear, name, counted(*size))
    monkeypatch.setattr(cpu_linear, "_take", lambda address: next(blocks))
    records = lambda *arguments: numba.carray(*arguments).view(np.recarray)  # noqa: E731  as in compiled code
    monkeypatch.setattr(cpu_linear, "carray", records)
    work = cpu_linear._work.py_func
    monkeypatch.setattr(
        cpu_linear, "_parallel", lambda: lambda worker, job, *_: work(ctypes.cast(job, ctypes.c_void_p), None)
    )
    result = cpu_linear.linear(x, weight)
    assert computed == Counter(range(result.data_ptr(), result.data_ptr() + 4 * rows * columns, 4))


def test_a_weight_is_read_where_it_lies_in_any_layout():
    weight, x = random(40, 48), random(2, 3, 48, seed=1)
    expected = cpu_linear.linear(x, weight)
    assert expected.shape == (2, 3, 40)
    for same in (torch.cat((weight, weight), 1)[:, :48], weight.t().contiguous().t()):
        assert torch.equal(cpu_linear.linear(x.transpose(0, 1), same).transpose(0, 1), expected)
    layer = make_layer((128, 128))
    layer.weight.data.zero_()
    assert not apply(layer, x.new_ones(3, 128)).any()


def test_without_openmp_the_caller_computes_alone(monkeypatch):
    x, weight = random(50, 64), random(96, 64)
    expected = cpu_linear.linear(x, weight)
    monkeypatch.setattr(cpu_linear.ctypes, "CDLL", lambda name: SimpleNamespace())
    cpu_linear._parallel.cache_clear()
    assert torch.equal(cpu_linear.linear(x, weight), expected)
    monkeypatch.undo()
    cpu_linear._parallel.cache_clear()


def test_off_is_vllms_own_kernel(monkeypatch):
    settings = SpeculationConfig("off", batch_invariant="off").vllm_arguments()
    engine = SimpleNamespace(speculative_config=None, **settings)
    monkeypatch.setattr(cpu_fixes, "get_current_vllm_config_or_none", lambda: engine)
    layer = make_layer((128, 128), bias=True)
    for factor in (1.0, 2.0):
        layer.weight.mul_(factor)
        cpu_fixes.attach(layer)
        theirs = ops.create_onednn_mm(layer.weight.t(), 32)
        for rows in (1, 5, 40):
            x = random(rows, 128)
            assert torch.equal(apply(layer, x), ops.onednn_mm(theirs, x, layer.bias))


@pytest.mark.parametrize("factor", [1.2, 2.0])
def test_a_kernel_that_is_slower_than_vllms_is_said_with_the_factor_and_the_remedy(factor, monkeypatch, caplog):
    monkeypatch.setattr(
        cpu_fixes, "cost", lambda weight, rows, product: product(torch.ones(rows, 128)).shape[1] * factor / 128
    )
    cpu_fixes._say_if_slow(torch.nn.ModuleList([make_layer((3, 40)), make_layer((128, 128))]))
    said = "layers of 128 x 128 take 2.0 times" in caplog.text and "batch_invariant=off" in caplog.text
    assert said == (factor > 1.3)
    assert len(caplog.records) == said
