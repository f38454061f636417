"""What the plugin says of an engine that has started."""

import pytest

from sam.config import SpeculationConfig
from sam.vllm.plugin import scheduling_remark


@pytest.mark.parametrize(
    ("method", "asynchronous", "is_cpu", "said"),
    [
        ("ngram", False, False, "speculation=ngram costs asynchronous scheduling"),
        ("suffix", False, False, "speculation=suffix costs asynchronous scheduling"),
        ("sam", False, False, "(async_scheduling=auto)"),
        ("sam", True, False, None),
        ("off", False, False, None),
        ("ngram", False, True, None),
    ],
)
def test_a_drafter_that_costs_asynchronous_scheduling_is_named(monkeypatch, method, asynchronous, is_cpu, said):
    monkeypatch.setattr("vllm.platforms.current_platform.is_cpu", lambda: is_cpu)
    remark = scheduling_remark(SpeculationConfig(method=method), {"asynchronous": asynchronous})
    assert (remark is None) if said is None else said in remark
