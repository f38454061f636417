"""Compiled engines, as vLLM runs them by default: the same tokens with and without drafts, however they are scheduled,
after a weight sync too."""

import shutil

import numpy as np
import pytest
import torch

from sam.vllm import cpu_fixes, row_classes
from tests.sam.engine.async_cpu import ASYNC_SAM
from tests.sam.engine.tiny_engine import SAM, VOCABULARY, generate, save_model

pytestmark = [
    pytest.mark.engine,
    pytest.mark.usefixtures("asynchronous"),
    pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no compiler"),
]
ASYNC = {"async_scheduling": True, "distributed_executor_backend": "uni"}


@pytest.mark.parametrize(
    ("dtype", "compiled"), [("float32", True), ("bfloat16", False)], ids=["compiled", "eager, bfloat16"]
)
def test_speculation_changes_no_token(dtype, compiled, tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_fixes, "SMALL_WEIGHTS", 16_000)
    monkeypatch.setattr(row_classes, "CACHE_FOLDER", tmp_path / "classes")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")
    model = save_model(tmp_path / "model")
    used = []

    def changed_weights(runner):
        linears = [layer.cpu_linear for layer in runner.model.modules() if hasattr(layer, "cpu_linear")]
        used.append({linear.packed for linear in linears})
        runner.model.load_weights((name, 1.1 * weight) for name, weight in model.network.state_dict().items())

    def run(speculative_config, batch, **scheduled):
        generator = np.random.default_rng(0)
        prompts = [generator.integers(0, VOCABULARY, 4 + row % 20).tolist() for row in range(48)]
        settings = [{"max_tokens": 64, "seed": row} for row in range(48)]
        options = {"dtype": dtype, "enforce_eager": not compiled, "observe": changed_weights, **scheduled}
        return generate(model, prompts, settings, speculative_config, batch, **options)

    with torch._dynamo.config.patch(disable=False):
        before = dict(torch._dynamo.utils.counters["stats"])
        off, on = run(None, 48), run(SAM, 29)
        asynchronous = [run(ASYNC_SAM, 29, **ASYNC)] if compiled else []
        traced = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before.get("unique_graphs", 0)
    assert (traced >= len(used)) if compiled else traced == 0
    # By one kernel each.
    assert used == [used[0]] * (2 + len(asynchronous)) and used[0]
    for result in (on, *asynchronous):
        assert off.tokens == result.tokens and off.logprobs == result.logprobs
    drafters = [result.installed["drafter"] for result in (off, on, *asynchronous)]
    assert drafters == [None, "SamProposer", "AsyncSamProposer"][: len(drafters)]
    assert all(result.accepted > 50 for result in (on, *asynchronous))
