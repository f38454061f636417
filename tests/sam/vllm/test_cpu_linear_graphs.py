"""Linear layers on a CPU in compiled graphs."""

import pytest
import torch

from sam.vllm import cpu_linear, row_classes
from tests.sam.vllm.test_cpu_linear import apply, make_layer, own_cache, random, set_mode  # noqa: F401


@torch._dynamo.config.patch(disable=False)
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_compiled_graphs_follow_the_weight(packed, monkeypatch):
    cpu_linear._define_operator()
    monkeypatch.setattr(cpu_linear, "PREFERENCE", (packed, not packed))
    layer = make_layer()
    compiled = torch.compile(lambda x: apply(layer, x) * 2, backend="aot_eager", fullgraph=True, dynamic=True)
    packs, pack = [], cpu_linear._pack
    monkeypatch.setattr(cpu_linear, "_pack", lambda weight: packs.append(1) or pack(weight))
    for seed in (5, 6):
        layer.weight.data.copy_(random(192, 576, seed=seed))
        cpu_linear.attach(layer)
        for rows in (1, 5, 40):
            x = random(rows, 576, seed=7)
            with torch.inference_mode():
                assert torch.equal(compiled(x), apply(layer, x) * 2)
    assert len(packs) == (2 if packed else 0)


@pytest.mark.parametrize("shape", [(192, 576), (128, 128)], ids=["any rows", "multiples of 8"])
@pytest.mark.parametrize("largest", [4096, 4095])
def test_graphs_call_the_kernel_itself_if_the_largest_batch_was_compared(shape, largest, monkeypatch):
    monkeypatch.setattr(row_classes, "find_row_class", lambda *arguments: row_classes.RowClass(1, largest))
    monkeypatch.setattr(cpu_linear, "LinearBase", torch.nn.Module)
    with set_mode("auto"):
        assert make_layer(shape).cpu_linear.is_direct == (largest == 4096)
