"""What the plugin says of an engine that has started, and what it refuses."""

import contextlib
from types import SimpleNamespace

import pytest

from sam.config import SpeculationConfig
from sam.vllm import patches, plugin, ranks
from sam.vllm.plugin import check_installed, check_scheduling


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


@pytest.mark.parametrize(
    ("additional", "method", "message"),
    [
        ({}, "synthetic", "rejection_sample_method=synthetic"),
        ({"rejection_sampler_config": {"enable_block_verify": True}}, "standard", "enable_block_verify=True"),
        ({"rejection_sampler_config": {"enable_entropy_verify": "true"}}, "standard", "enable_entropy_verify=true"),
        ({"enable_reduce_sample": 1}, "standard", "enable_reduce_sample=1"),
        ({"rejection_sampler_config": {"enable_block_verify": False}}, "standard", None),
    ],
)
def test_lossy_settings_are_refused(additional, method, message):
    speculative = SimpleNamespace(rejection_sample_method=method)
    config = SimpleNamespace(additional_config=additional, speculative_config=speculative)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        plugin.check_lossless(config)


def test_the_second_model_runner_is_refused():
    with pytest.raises(ValueError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        plugin.check_runner(SimpleNamespace(sample=None))
    plugin.check_runner(SimpleNamespace(_sample=None))


ALONE = {
    "tensor_parallel_size": 1, "pipeline_parallel_size": 1, "prefill_context_parallel_size": 1,
    "distributed_executor_backend": "mp",
}  # fmt: skip


@pytest.mark.parametrize(
    "several",
    [
        {"pipeline_parallel_size": 2},
        {"prefill_context_parallel_size": 2},
        {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"},
    ],
)
def test_ranks_that_could_not_agree_under_asynchronous_scheduling_are_refused(several):
    name, value = list(several.items())[-1]
    with pytest.raises(ValueError, match=f"with {name}={value}: .*: set speculation.async_scheduling=off"):
        ranks.check_async(SimpleNamespace(**ALONE | several))
    ranks.check_async(SimpleNamespace(**ALONE | {"tensor_parallel_size": 2}))
