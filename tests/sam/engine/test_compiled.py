"""Compiled engines, as vLLM runs them by default, and eager ones in bfloat16: the same tokens with and without drafts,
after a weight sync too."""

import shutil

import numpy as np
import pytest
import torch

from sam.vllm import cpu_fixes
from tests.sam.engine.tiny_engine import VOCABULARY, Engine, assert_same, save_model

pytestmark = [
    pytest.mark.engine,
    pytest.mark.usefixtures("asynchronous"),
    pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no compiler"),
]
ENGINES = {
    "compiled, asynchronous": ("float32", False, True),
    "eager, bfloat16": ("bfloat16", True, False),
}


@pytest.mark.parametrize(("dtype", "eager", "is_asynchronous"), ENGINES.values(), ids=ENGINES)
def test_speculation_changes_no_token(dtype, eager, is_asynchronous, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    model = save_model(tmp_path / "model")

    def run(method, batch, is_async):
        generator = np.random.default_rng(0)
        prompts = [generator.integers(0, VOCABULARY, 4 + row % 20).tolist() for row in range(48)]
        with Engine(model, method, batch, is_async, dtype=dtype, enforce_eager=eager) as engine:
            network = engine.runner.model
            kernels = {layer.cpu_linear for layer in network.modules() if hasattr(layer, "cpu_linear")}
            assert kernels == {cpu_fixes.multiply}
            network.load_weights((name, 1.1 * weight) for name, weight in model.network.state_dict().items())
            return engine.generate(prompts, [{"max_tokens": 64, "seed": row} for row in range(48)])

    with torch._dynamo.config.patch(disable=False):
        before = dict(torch._dynamo.utils.counters["stats"])
        off, on = run("off", 48, False), run("sam", 29, is_asynchronous)
        traced = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before.get("unique_graphs", 0)
    assert traced == 0 if eager else traced >= 2
    assert_same(on, off)
    assert on.accepted > 50
