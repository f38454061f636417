"""What the plugin says of an engine that has started, and what it refuses."""

import contextlib
from types import SimpleNamespace

import pytest
from transformers import AutoConfig
from vllm.config import ModelConfig

from sam.config import SpeculationConfig
from sam.vllm import patches, plugin, ranks


def test_exact_verification_refuses_positions_that_are_on_the_device():
    def check(on_the_device, drafter=None, **settings):
        speculative = SimpleNamespace(method="mtp")
        flags = {"use_async_scheduling": True, "use_async_spec_decode": on_the_device}
        runner = SimpleNamespace(drafter=drafter, speculative_config=speculative, **flags)
        plugin.check_scheduling(runner, SpeculationConfig(**settings))

    with pytest.raises(ValueError, match="verification=exact.*'mtp'.*async_scheduling=False"):
        check(True)
    check(True, verification="rejection")
    check(False)
    check(True, SimpleNamespace(bind=None))  # sam's, which counts on the host


@pytest.mark.parametrize(
    ("method", "has", "expected"),
    [
        ("sam", "SamProposer", None),
        ("sam", "AscendAsyncSamProposer", None),
        ("sam", "SamSpeculator", None),
        ("off", None, None),
        ("off", "SamProposer", "None"),
        ("draft_model", "AsyncTrainedProposer", None),
        ("eagle3", "EagleProposer", "Eagle3Proposer"),
    ],
)
def test_the_drafter_is_the_one_that_is_asked_for(method, has, expected):
    wanted = SpeculationConfig(method, "folder")
    refused = pytest.raises(RuntimeError, match=f"drafter {has}, expected {expected}")
    with refused if expected else contextlib.nullcontext():
        plugin.check_installed(wanted, {"drafter": has, "verification": "exact"})


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


class Runner:
    def sample_tokens(self):
        return self._sample(None, None)


class OtherRunner:
    def sample_tokens(self):
        return self.sampler(None, None)


def test_a_model_runner_that_samples_elsewhere_is_refused():
    for runner in (OtherRunner(), SimpleNamespace()):
        with pytest.raises(ValueError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
            plugin.check_runner(runner)
    plugin.check_runner(Runner())


@pytest.mark.parametrize(
    "several",
    [
        {"pipeline_parallel_size": 2},
        {"prefill_context_parallel_size": 2},
        {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"},
    ],
)
def test_ranks_that_could_not_agree_under_asynchronous_scheduling_are_refused(several):
    sizes = dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size"), 1)
    alone, (name, value) = sizes | {"distributed_executor_backend": "mp"}, list(several.items())[-1]
    with pytest.raises(ValueError, match=f"with {name}={value}: .*: set speculation.async_scheduling=off"):
        ranks.check_async(SimpleNamespace(**alone | several))
    ranks.check_async(SimpleNamespace(**alone | {"tensor_parallel_size": 2}))


# Architecture by transformers' name of it: vLLM's class, further fields of its config, and whether it is recurrent.
MODELS = {
    "qwen3_next": ("Qwen3NextForCausalLM", {}, True),
    "mamba2": ("Mamba2ForCausalLM", {}, True),
    "lfm2": ("Lfm2ForCausalLM", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, True),
    "qwen3": ("Qwen3ForCausalLM", {}, False),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", {"num_hidden_layers": 1, "layer_types": ["attention"]}, False),
}


@pytest.mark.parametrize("name", MODELS)
def test_drafters_that_may_pause_are_refused_for_models_with_recurrent_state(tmp_path, monkeypatch, name):
    # vLLM looks at a model's class in a process that imports vLLM once more.
    monkeypatch.setattr("vllm.model_executor.models.registry._run_in_subprocess", lambda function: function())
    architecture, fields, is_recurrent = MODELS[name]
    AutoConfig.for_model(name, architectures=[architecture], **fields).save_pretrained(tmp_path)
    model = ModelConfig(str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16")
    refused = pytest.raises(ValueError, match=f"no drafts for {name}, .*set speculation=off")
    for method in plugin.MAY_PAUSE:
        with refused if is_recurrent else contextlib.nullcontext():
            plugin.check_recurrent_state(model, method)
    for method in (None, "mtp"):
        plugin.check_recurrent_state(model, method)
