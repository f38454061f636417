import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm import _custom_ops as ops

from sam.config import SpeculationConfig
from sam.vllm import cpu_linear, row_classes

ROOT = Path(__file__).parents[3]

SHAPES = [(192, 576), (64, 640), (277, 128), (128, 128), (130, 514)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(row_classes, "CACHE_FILE", tmp_path / "classes.json")
    monkeypatch.setattr(row_classes, "_known", {})


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_layer(shape=(192, 576), dtype=torch.float32, bias=False, seed=0):
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(random(*shape, dtype=dtype, seed=seed) * 0.05, requires_grad=False)
    layer.bias = torch.nn.Parameter(random(shape[0], dtype=dtype, seed=1), requires_grad=False) if bias else None
    cpu_linear.attach(layer, remove_weight=True)
    return layer


@contextmanager
def set_mode(mode, drafter=None):
    """`speculation.batch_invariant` of an engine that loads its model, and vLLM's name of its drafter."""
    with pytest.MonkeyPatch.context() as patch:
        arguments = SpeculationConfig(batch_invariant=mode).vllm_arguments()
        config = SimpleNamespace(
            additional_config=arguments["additional_config"],
            scheduler_config=SimpleNamespace(max_num_batched_tokens=4096),
            speculative_config=SimpleNamespace(method=drafter),
        )
        patch.setattr(cpu_linear, "get_current_vllm_config_or_none", lambda: config)
        yield


def needs_packed(dtype):
    """Skip where the processor has no packed kernel of oneDNN's: without AVX-512 none in bfloat16."""
    try:
        with torch.inference_mode():
            cpu_linear._product(cpu_linear._pack(random(64, 64, dtype=dtype)), None, None)(random(1, 64, dtype=dtype))
    except RuntimeError:
        pytest.skip(f"this processor has no packed kernel in {dtype}")


def apply(layer, x):
    """As vllm.model_executor.layers.utils.cpu_unquantized_gemm."""
    return layer.cpu_linear(x, layer.weight, layer.bias)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_depend_neither_on_their_number_nor_on_their_place(shape, dtype, packed, bias, monkeypatch):
    if packed:
        needs_packed(dtype)
    monkeypatch.setattr(cpu_linear, "PREFERENCE", (packed, not packed))
    layer = make_layer(shape, dtype, bias)
    assert layer.cpu_linear.packed == packed
    x = random(300, shape[1], dtype=dtype, seed=2)
    whole = apply(layer, x)
    for count in (*range(1, 130), 256):
        start = 7 * count % (300 - count)
        assert torch.equal(apply(layer, x[start : start + count]), whole[start : start + count]), count
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, layer.weight, layer.bias))


class RowsMultiplied(TorchDispatchMode):
    """The numbers of rows that vLLM's kernel is called with."""

    def __init__(self):
        super().__init__()
        self.called = set()

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if function is torch.ops._C.onednn_mm.default:
            self.called.add(len(arguments[1]))
        return function(*arguments, **(keywords or {}))


@pytest.mark.parametrize(
    ("shape", "different"),
    [((128, 128), {*range(1, 9), *range(16, 41, 8)}), ((192, 576), {*range(1, 41)})],
    ids=str,
)
def test_small_layers_have_few_numbers_of_rows_and_few_are_padded(shape, different, monkeypatch):
    monkeypatch.setattr(row_classes, "find_row_class", lambda *arguments: row_classes.RowClass(1, 4096))
    with set_mode("auto"):
        layer = make_layer(shape)
    assert layer.cpu_linear.packed
    with RowsMultiplied() as rows:
        for count in range(1, 41):
            assert apply(layer, random(count, shape[1])).shape == (count, shape[0])
    assert rows.called == different


@pytest.mark.parametrize(
    "x", [random(192, 1152)[:, 576:], random(2, 6, 576), random(0, 576)], ids=["strided", "more dimensions", "no rows"]
)
def test_inputs_of_any_form(x):
    layer = make_layer()
    torch.testing.assert_close(apply(layer, x), torch.nn.functional.linear(x, layer.weight))


def write_data(layer, new):
    layer.weight.data.copy_(new)


def write_new_data(layer, new):
    layer.weight.data = new.clone()


def write_new_parameter(layer, new):
    layer.weight = torch.nn.Parameter(new.clone(), requires_grad=False)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("write", [write_data, write_new_data, write_new_parameter], ids=lambda write: write.__name__)
def test_new_weights_count_after_attach(write, packed, monkeypatch):
    monkeypatch.setattr(cpu_linear, "PREFERENCE", (packed, not packed))
    layer, x = make_layer(), random(5, 576, seed=3)
    before, key = apply(layer, x), layer.cpu_linear._key
    for seed in (10, 11):
        fresh = make_layer(seed=seed)
        write(layer, fresh.weight.detach())
        cpu_linear.attach(layer, remove_weight=True)
        assert layer.weight.shape == (192, 576) and layer.cpu_linear._key is key
        after = apply(layer, x)
        assert torch.equal(after, apply(fresh, x)) and not torch.equal(after, before)


def make_runner(load_weights, reload_weights):
    model = SimpleNamespace(load_weights=load_weights)
    nothing = {"execute_model": lambda: None, "_dummy_run": lambda: None}
    return SimpleNamespace(model=model, reload_weights=reload_weights, **nothing)


def test_a_weight_is_packed_once_for_each_load(monkeypatch):
    first, x, packs = make_layer(), random(5, 576), []
    second = make_layer(seed=1)
    second.weight = first.weight  # tied
    loads = {"load_weights": lambda: first.weight.data.mul_(2), "reload_weights": lambda: first.weight.data.mul_(3)}
    runner = make_runner(**loads)
    for _ in range(2):
        cpu_linear.pack_after_loads(runner)
    pack = cpu_linear._pack
    monkeypatch.setattr(cpu_linear, "_pack", lambda weight: packs.append(1) or pack(weight))
    for count, load in enumerate((lambda: None, runner.model.load_weights, runner.reload_weights), start=1):
        load()
        for layer in (first, second, first):
            torch.testing.assert_close(apply(layer, x), torch.nn.functional.linear(x, first.weight))
        assert len(packs) == 2 * count


def test_a_load_that_fails_counts_too():
    layer, x = make_layer(), random(5, 576)

    def load():
        layer.weight.data.mul_(2)
        raise ValueError("no such parameter")

    runner = make_runner(load, load)
    cpu_linear.pack_after_loads(runner)
    before = apply(layer, x)
    with pytest.raises(ValueError, match="no such parameter"):
        runner.model.load_weights()
    torch.testing.assert_close(apply(layer, x), 2 * before)


def inject(monkeypatch, wrong):
    """A packed kernel whose rows are a little off where `wrong(number of rows)`."""
    original = cpu_linear._product

    def product(pack, weight, bias):
        true = original(pack, weight, bias)
        return true if pack is None else lambda rows: true(rows) * (1 + 1e-6 * wrong(len(rows)))

    monkeypatch.setattr(cpu_linear, "_product", product)


def test_a_kernel_that_differs_for_few_rows_is_padded(monkeypatch):
    true = make_layer().cpu_linear.row_class.smallest  # without AVX-512 few rows differ by themselves
    monkeypatch.setattr(row_classes, "_known", {})
    row_classes.CACHE_FILE.unlink()
    inject(monkeypatch, lambda rows: rows < 6)
    layer, x = make_layer(), random(40, 576)
    assert layer.cpu_linear.packed and layer.cpu_linear.row_class.smallest == max(6, true)
    whole = apply(layer, x)
    for count in range(1, 41):
        assert torch.equal(apply(layer, x[:count]), whole[:count])


def test_a_kernel_whose_rows_never_agree_is_not_used(monkeypatch):
    calls = []
    inject(monkeypatch, lambda rows: calls.append(rows) or len(calls))
    layer, x = make_layer(), random(40, 576)
    assert not layer.cpu_linear.packed
    whole = apply(layer, x)
    for count in range(1, 41):
        assert torch.equal(apply(layer, x[:count]), whole[:count])


def test_without_any_kernel_that_agrees_a_warning_says_so_or_the_engine_does_not_start(monkeypatch):
    warnings = []  # vLLM, once it is configured, keeps them from caplog
    monkeypatch.setattr(cpu_linear.logger, "warning", lambda text, *values: warnings.append(text % values))
    monkeypatch.setattr(row_classes, "find_row_class", lambda *arguments: None)
    layer, x = make_layer(), random(40, 576)
    torch.testing.assert_close(apply(layer, x), torch.nn.functional.linear(x, layer.weight))
    assert len(warnings) == 1 and "may differ between speculation on and off" in warnings[0]
    with set_mode("on"), pytest.raises(RuntimeError, match="batch_invariant=on: a .* of 192 x 576 .* auto or"):
        make_layer()


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


def cannot_pack(weight):
    raise RuntimeError("could not create a primitive")


def test_off_without_such_a_kernel_is_torchs_own(monkeypatch):
    monkeypatch.setattr(cpu_linear, "_pack", cannot_pack)
    with set_mode("off"):
        layer, x = make_layer(), random(3, 576)
    assert torch.equal(apply(layer, x), torch.nn.functional.linear(x, layer.weight))


STRICT = """
import sys, torch
from pathlib import Path
from sam.vllm import cpu_linear, row_classes
row_classes.CACHE_FILE = Path(sys.argv[1])
cpu_linear.PREFERENCE = (False, True)
found = []
for threads in (1, 2):
    torch.set_num_threads(threads)
    for shape in ((128, 128), (384, 128), (128, 384), (300, 64)):
        generator = torch.Generator().manual_seed(0)
        weight, x = (torch.randn(size, generator=generator) for size in (shape, (64, shape[1])))
        layer = torch.nn.Module()
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        linear = cpu_linear.CpuLinear(layer)
        assert not linear.packed and linear.row_class.smallest < 32, (shape, linear.row_class)
        rows = linear(x, weight)
        for count in range(1, 64):
            assert torch.equal(linear(x[:count], weight), rows[:count]), (threads, shape, count)
        found.append(rows)
for one, two in zip(found[:4], found[4:]):
    assert torch.equal(one, two)
"""


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch without MKL")
def test_in_mkls_strict_mode_fewer_rows_are_padded_and_threads_change_nothing(tmp_path):
    environment = os.environ | {"MKL_CBWR": "AVX2,STRICT", "OMP_NUM_THREADS": "2", "GOMP_SPINCOUNT": "20000"}
    command = [sys.executable, "-c", STRICT, str(tmp_path / "classes")]
    subprocess.run(command, env=environment, cwd=ROOT, check=True, timeout=120)


def test_a_kernel_that_cannot_be_made_is_not_used(monkeypatch):
    monkeypatch.setattr(cpu_linear, "_pack", cannot_pack)
    assert not make_layer().cpu_linear.packed


def test_other_layers_are_left_alone():
    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(torch.empty(4, 4, device="meta"), requires_grad=False)
    cpu_linear.attach(layer, remove_weight=True)
    assert layer.cpu_linear is torch.nn.functional.linear
    convolution = torch.nn.Conv1d(4, 4, 3)
    cpu_linear.attach(convolution, remove_weight=True)
    assert convolution.weight.shape == (4, 4, 3)
