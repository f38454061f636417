"""What the plugin says of an engine that has started, and what it refuses."""

from types import SimpleNamespace

import pytest

from sam.config import SpeculationConfig
from sam.vllm import patches, plugin
from sam.vllm.plugin import check_installed, check_scheduling, scheduling_remark


@pytest.mark.parametrize(
    ("method", "asynchronous", "is_cpu", "said"),
    [
        ("ngram", False, False, "speculation=ngram costs asynchronous scheduling"),
        ("suffix", False, False, "speculation=suffix costs asynchronous scheduling"),
        ("sam", False, False, "(async_scheduling=auto)"),
        ("hybrid", False, False, "(async_scheduling=auto)"),
        ("sam", True, False, None),
        ("off", False, False, None),
        ("ngram", False, True, None),
    ],
)
def test_a_drafter_that_costs_asynchronous_scheduling_is_named(monkeypatch, method, asynchronous, is_cpu, said):
    monkeypatch.setattr("vllm.platforms.current_platform.is_cpu", lambda: is_cpu)
    remark = scheduling_remark(SpeculationConfig(method, "folder"), {"asynchronous": asynchronous})
    assert (remark is None) if said is None else said in remark


def runner(drafter, use_async_spec_decode: bool):
    return SimpleNamespace(
        drafter=drafter,
        use_async_scheduling=True,
        use_async_spec_decode=use_async_spec_decode,
        speculative_config=SimpleNamespace(method="mtp"),
    )


def test_exact_verification_refuses_positions_that_are_on_the_device():
    config = SpeculationConfig()
    with pytest.raises(ValueError, match="verification=exact.*'mtp'.*async_scheduling=False"):
        check_scheduling(runner(SimpleNamespace(), True), config)
    check_scheduling(runner(SimpleNamespace(), True), SpeculationConfig(verification="rejection"))
    check_scheduling(runner(SimpleNamespace(), False), config)
    check_scheduling(runner(SimpleNamespace(bind=None), True), config)  # sam's, which counts on the host


@pytest.mark.parametrize(
    ("method", "has", "scheduling", "expected"),
    [
        ("sam", "SamProposer", "auto", None),
        ("sam", "AsyncSamProposer", "auto", None),
        ("sam", "AscendAsyncSamProposer", "auto", None),
        ("sam", "SamProposer", "on", "AsyncSamProposer"),
        ("draft_model", "AsyncTrainedProposer", "auto", None),
        ("draft_model", "AsyncTrainedProposer", "off", "TrainedProposer"),
        ("eagle3", "AsyncEagle3Proposer", "on", None),
        ("eagle3", "EagleProposer", "auto", "Eagle3Proposer"),
    ],
)
def test_the_drafter_is_the_one_for_the_engines_scheduling(method, has, scheduling, expected):
    wanted = SpeculationConfig(method, "folder", async_scheduling=scheduling)
    status = {"drafter": has, "verification": "exact"}
    if expected is None:
        check_installed(wanted, status)
    else:
        with pytest.raises(RuntimeError, match=f"drafter {has}, expected {expected}"):
            check_installed(wanted, status)


def test_a_vllm_that_is_not_known_is_left_alone_and_named_once(monkeypatch, caplog):
    monkeypatch.setattr("vllm.__version__", "0.27.1")
    monkeypatch.setattr(patches, "wrap", None)
    plugin.register()
    plugin.register()
    assert caplog.text.count("vLLM 0.27.1: the plugin sam knows 0.23, 0.32, 0.33, and does nothing here") == 1
