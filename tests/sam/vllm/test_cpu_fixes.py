"""Linear layers on a CPU: rows that do not depend on the batch, and the numbers of rows for which kernels agree. Weight
syncs and graphs are in tests/sam/engine."""

from types import SimpleNamespace

import pytest
import torch
from vllm import _custom_ops as ops

from sam.config import SpeculationConfig
from sam.vllm import cpu_fixes, row_classes
from sam.vllm.row_classes import RowClass, find_row_class, known_or_found, multiply

WEIGHT = torch.randn(8, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """Where classes are kept."""
    monkeypatch.setattr(row_classes, "CACHE_FOLDER", tmp_path / "cache" / "classes")
    return row_classes.CACHE_FOLDER


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_layer(shape, dtype=torch.float32, bias=False):
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(random(*shape, dtype=dtype) * 0.05, requires_grad=False)
    layer.bias = torch.nn.Parameter(random(shape[0], dtype=dtype, seed=1), requires_grad=False) if bias else None
    cpu_fixes.attach(layer, remove_weight=True)
    return layer


def needs_packed(dtype):
    """Skip where the processor has no packed kernel of oneDNN's: without AVX-512 none in bfloat16."""
    try:
        with torch.inference_mode():
            cpu_fixes._product(cpu_fixes._pack(random(64, 64, dtype=dtype)), None, None)(random(1, 64, dtype=dtype))
    except RuntimeError:
        pytest.skip(f"this processor has no packed kernel in {dtype}")


def apply(layer, x):
    """As vllm.model_executor.layers.utils.cpu_unquantized_gemm."""
    return layer.cpu_linear(x, layer.weight, layer.bias)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "bias"), [((277, 576), True), ((128, 128), False)], ids=str)
def test_rows_depend_neither_on_their_number_nor_on_their_place(shape, bias, dtype, packed, monkeypatch):
    if packed:
        needs_packed(dtype)
    monkeypatch.setattr(cpu_fixes, "PREFERENCE", (packed, not packed))
    layer = make_layer(shape, dtype, bias)
    assert layer.cpu_linear.packed == packed
    x = random(300, shape[1], dtype=dtype, seed=2)
    whole = apply(layer, x)
    for count in (*range(1, 130), 256):
        start = 7 * count % (300 - count)
        assert torch.equal(apply(layer, x[start : start + count]), whole[start : start + count]), count
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_without_any_kernel_that_agrees_a_warning_says_so(monkeypatch):
    warnings = []  # vLLM, once it is configured, keeps them from caplog
    monkeypatch.setattr(cpu_fixes.logger, "warning", lambda text, *values: warnings.append(text % values))
    monkeypatch.setattr(row_classes, "find_row_class", lambda *arguments: None)
    layer, x = make_layer((192, 576)), random(40, 576)
    torch.testing.assert_close(apply(layer, x), torch.nn.functional.linear(x, layer.weight))
    assert len(warnings) == 1 and "may differ between speculation on and off" in warnings[0]


def test_off_is_vllms_own_kernel(monkeypatch):
    needs_packed(torch.float32)
    monkeypatch.setattr(row_classes, "find_row_class", None)  # not called
    settings = SpeculationConfig("off", batch_invariant="off").vllm_arguments()
    engine = SimpleNamespace(speculative_config=None, **settings)
    monkeypatch.setattr(cpu_fixes, "get_current_vllm_config_or_none", lambda: engine)
    layer = make_layer((128, 128), bias=True)
    assert layer.cpu_linear.packed
    theirs = ops.create_onednn_mm(layer.weight.t(), 32)
    for rows in (1, 5, 40):
        x = random(rows, 128)
        assert torch.equal(apply(layer, x), ops.onednn_mm(theirs, x, layer.bias))


def exact(rows):
    """Integers in float64: bits do not depend on the order of sums."""
    return rows.double().mul(1024).round() @ WEIGHT.mul(1024).round().T


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (lambda rows: False, RowClass(1, 8192)),
        (lambda rows: rows < 16, RowClass(16, 8192)),
        (lambda rows: rows < 3 or rows == 1024, RowClass(3, 777)),
        (lambda rows: rows != 64, RowClass(64, 64)),
    ],
    ids=["all", "few", "few and many", "every number another"],
)
def test_the_class_around_64_rows_is_found_and_any_number_of_rows_is_multiplied_within_it(wrong, expected):
    """Rows of the kernel differ in their last bits where `wrong(number of rows)`."""

    def kernel(rows):
        return exact(rows) + (1 if wrong(len(rows)) else 0)

    assert find_row_class((kernel,), 8, 16, torch.float32) == expected
    rows = torch.randn(200, 16)
    for count in range(201):
        for multiple in (1, 8):
            assert torch.equal(multiply(kernel, rows[:count], expected, multiple), exact(rows[:count]))
    by_place = (lambda rows: exact(rows) + (torch.arange(len(rows)) % 16 == 0)[:, None],)
    assert find_row_class(by_place, 8, 16, torch.float32) is None, "rows that depend on their place have no class"


def test_a_class_is_found_once_by_machine_and_a_file_that_cannot_be_used_costs_a_comparison_only(folder, monkeypatch):
    found = []

    def find(row_class):
        return lambda: found.append(row_class) or row_class

    for _ in range(2):
        for name, row_class in {"packed 8x16": RowClass(2, 64), "plain 8x16": None}.items():
            assert known_or_found(name, find(row_class)) == row_class
    assert len(found) == len(list(folder.iterdir())) == 2
    for content in (b"{", b"[1]"):
        for path in folder.iterdir():
            path.write_bytes(content)
        assert known_or_found("packed 8x16", find(RowClass(2, 64))) == RowClass(2, 64)
    assert len(found) == 4
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert known_or_found("packed 8x16", find(RowClass(5, 64))) == RowClass(5, 64)
