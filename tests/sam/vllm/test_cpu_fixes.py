"""Linear layers on a CPU: rows that do not depend on the batch. Weight syncs and graphs are in tests/sam/engine."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from vllm import _custom_ops as ops

from sam.config import SpeculationConfig
from sam.vllm import cpu_fixes, row_classes

SHAPES = [(192, 576, True), (277, 128, True), (128, 128, False)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(row_classes, "CACHE_FOLDER", tmp_path / "classes")


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_layer(shape=(192, 576), dtype=torch.float32, bias=False, seed=0):
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(random(*shape, dtype=dtype, seed=seed) * 0.05, requires_grad=False)
    layer.bias = torch.nn.Parameter(random(shape[0], dtype=dtype, seed=1), requires_grad=False) if bias else None
    cpu_fixes.attach(layer, remove_weight=True)
    return layer


@contextmanager
def set_mode(mode):
    """`speculation.batch_invariant` of an engine that loads its model."""
    with pytest.MonkeyPatch.context() as patch:
        arguments = SpeculationConfig(batch_invariant=mode).vllm_arguments()
        config = SimpleNamespace(additional_config=arguments["additional_config"], speculative_config=None)
        patch.setattr(cpu_fixes, "get_current_vllm_config_or_none", lambda: config)
        yield


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
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_depend_neither_on_their_number_nor_on_their_place(shape, dtype, packed, monkeypatch):
    if packed:
        needs_packed(dtype)
    monkeypatch.setattr(cpu_fixes, "PREFERENCE", (packed, not packed))
    *shape, bias = shape
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
    layer, x = make_layer(), random(40, 576)
    torch.testing.assert_close(apply(layer, x), torch.nn.functional.linear(x, layer.weight))
    assert len(warnings) == 1 and "may differ between speculation on and off" in warnings[0]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_off_is_vllms_own_kernel(dtype, bias, monkeypatch):
    needs_packed(dtype)
    monkeypatch.setattr(row_classes, "find_row_class", None)  # not called
    with set_mode("off"):
        layer = make_layer((128, 128), dtype, bias)
    assert layer.cpu_linear.packed
    theirs = ops.create_onednn_mm(layer.weight.t(), 32)
    for rows in (1, 5, 40):
        x = random(rows, 128, dtype=dtype)
        assert torch.equal(apply(layer, x), ops.onednn_mm(theirs, x, layer.bias))
