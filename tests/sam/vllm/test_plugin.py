"""What the plugin says of an engine that has started, and what it refuses."""

import contextlib
from types import SimpleNamespace

import pytest
from transformers import AutoConfig
from vllm.config import ModelConfig

from sam.config import SpeculationConfig
from sam.vllm import patches, plugin, ranks
from sam.vllm.paths import rows
from sam.vllm.trained.proposer import WithModel


def test_exact_verification_refuses_positions_that_are_on_the_device():
    def check(on_the_device, drafter=None, **settings):
        speculative = SimpleNamespace(method="mtp")
        runner = SimpleNamespace(drafter=drafter, speculative_config=speculative, use_async_spec_decode=on_the_device)
        plugin.check_scheduling(runner, SpeculationConfig(**settings))

    with pytest.raises(ValueError, match="verification=exact.*'mtp'.*async_scheduling=False"):
        check(True)
    check(True, verification="rejection")
    check(False)
    check(True, SimpleNamespace(bind=None))  # sam's, which counts on the host


@pytest.mark.parametrize(
    ("method", "has", "is_right"),
    [
        ("sam", "AscendAsyncSamProposer", True),
        ("sam", "SamSpeculator", True),
        ("sam", "NgramProposerGPU", False),
        ("off", None, True),
        ("off", "SamProposer", False),
        ("draft_model", "AsyncTrainedProposer", True),
        ("eagle3", "EagleProposer", False),
    ],
)
def test_the_drafter_is_the_one_that_is_asked_for(method, has, is_right):
    wanted, refused = SpeculationConfig(method, "folder"), pytest.raises(RuntimeError, match=f"has drafter {has} and")
    with contextlib.nullcontext() if is_right else refused:
        plugin.check_installed(wanted, {"drafter": has, "verification": "exact"})
    with pytest.raises(RuntimeError, match=f"verification rejection, .* speculation={method}, verification=exact"):
        plugin.check_installed(wanted, {"drafter": has, "verification": "rejection"})


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
        ({"enable_reduce_sample": 1}, "standard", "enable_reduce_sample=1"),
        ({"rejection_sampler_config": {"enable_block_verify": False}}, "standard", None),
    ],
)
def test_lossy_settings_are_refused(additional, method, message):
    speculative = SimpleNamespace(rejection_sample_method=method)
    config = SimpleNamespace(additional_config=additional, speculative_config=speculative)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        plugin.check_lossless(config)


def test_a_model_runner_that_samples_elsewhere_is_refused():
    with pytest.raises(ValueError, match="VLLM_USE_V2_MODEL_RUNNER=0"):
        plugin.check_runner(SimpleNamespace())


ONE = {f"{kind}_parallel_size": 1 for kind in ("tensor", "pipeline", "data", "prefill_context", "decode_context")}
ONE |= {"distributed_executor_backend": "mp"}
PIPELINE = {"pipeline_parallel_size": 2}
LAUNCHED = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
CHECKS = {
    "speculation.async_scheduling=off": lambda config: ranks.check_async(config.parallel_config),
    "speculation.paths=1": rows.check_engine,
    "speculation=sam": lambda config: WithModel.__init__(None, config, None),
}


@pytest.mark.parametrize(
    ("remedy", "settings"),
    [
        ("speculation.async_scheduling=off", PIPELINE),
        ("speculation.async_scheduling=off", LAUNCHED),
        ("speculation.paths=1", PIPELINE),
        ("speculation.paths=1", LAUNCHED),
        ("speculation.paths=1", {"kv_transfer_config": object()}),
        ("speculation.paths=1", {"enable_return_routed_experts": True}),
        ("speculation=sam", {"data_parallel_size": 2}),
    ],
)
def test_engines_that_cannot_are_refused_in_a_line_that_names_the_setting_and_the_remedy(remedy, settings):
    parallel = SimpleNamespace(**ONE | {name: value for name, value in settings.items() if name in ONE})
    config = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(**settings), **settings)
    with pytest.raises(ValueError, match=f"{list(settings)[-1]}.*set .*{remedy}") as error:
        CHECKS[remedy](config)
    assert "\n" not in str(error.value)


# Architecture by transformers' name of it: vLLM's class, further fields of its config, and whether it is recurrent.
MODELS = {
    "qwen3_next": ("Qwen3NextForCausalLM", {}, True),
    "mamba2": ("Mamba2ForCausalLM", {}, True),
    "lfm2": ("Lfm2ForCausalLM", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, True),
    "qwen3": ("Qwen3ForCausalLM", {}, False),
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
