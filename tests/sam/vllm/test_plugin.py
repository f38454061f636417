"""What the plugin says of an engine that has started, what it refuses, and what its ranks know of each other."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig
from vllm.config import ModelConfig

from sam.config import SpeculationConfig
from sam.vllm import plugin, ranks
from sam.vllm.paths import rows
from sam.vllm.trained.proposer import WithModel


def test_another_drafter_or_verification_than_was_asked_for_is_refused():
    """That what was asked for is not, engines show."""
    for method, has in (("sam", "NgramProposerGPU"), ("off", "SamProposer"), ("eagle3", "EagleProposer")):
        with pytest.raises(RuntimeError, match=f"has drafter {has} and .* speculation={method}, "):
            plugin.check_installed(SpeculationConfig(method, "folder"), {"drafter": has, "verification": "exact"})
    with pytest.raises(RuntimeError, match="verification rejection, .* speculation=sam, verification=exact"):
        plugin.check_installed(SpeculationConfig(), {"drafter": "SamProposer", "verification": "rejection"})


def has_cache_of_two_groups(_) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32)
    rows.check_cache(KVCacheConfig(20, [], [KVCacheGroupSpec(["layer"], spec)] * 2))


def runs_asynchronously(engine) -> None:
    ranks.check_async(engine.parallel_config)


def has_a_model(engine) -> None:
    WithModel.__init__(None, engine, None)


def verifies_exactly(engine) -> None:
    plugin.check_scheduling(engine, SpeculationConfig())


ONE = {f"{kind}_parallel_size": 1 for kind in ("tensor", "pipeline", "data", "prefill_context", "decode_context")}
PIPELINE = {"pipeline_parallel_size": 2}
LAUNCHED = {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
BLOCKS = {"rejection_sampler_config": {"enable_block_verify": True}}


@pytest.mark.parametrize(
    ("check", "settings", "said"),
    [
        (runs_asynchronously, PIPELINE, "pipeline_parallel_size=2: .*set speculation.async_scheduling=off"),
        (runs_asynchronously, LAUNCHED, "external_launcher: .*set speculation.async_scheduling=off"),
        (rows.check_engine, PIPELINE, "pipeline_parallel_size=2: .*set speculation.paths=1"),
        (rows.check_engine, {"kv_transfer_config": object()}, "kv_transfer_config.*set speculation.paths=1"),
        (rows.check_engine, {"enable_return_routed_experts": True}, "routed_experts=True: .*set speculation.paths=1"),
        (has_cache_of_two_groups, {}, "full attention only: set speculation.paths=1"),
        (has_a_model, {"data_parallel_size": 2}, "data_parallel_size=2: .*speculation=sam"),
        (verifies_exactly, {"use_async_spec_decode": True}, "verification=exact.*'mtp'.*async_scheduling=False"),
        (plugin.check_lossless, {"rejection_sample_method": "synthetic"}, "rejection_sample_method=synthetic"),
        (plugin.check_lossless, BLOCKS, "enable_block_verify=True"),
        (plugin.check_lossless, {"enable_reduce_sample": 1}, "enable_reduce_sample=1"),
        (plugin.check_runner, {}, "VLLM_USE_V2_MODEL_RUNNER=0"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line_that_names_the_setting_and_the_remedy(check, settings, said):
    engine = SimpleNamespace(
        parallel_config=SimpleNamespace(**ONE | {"distributed_executor_backend": "mp"} | settings),
        model_config=SimpleNamespace(**settings),
        speculative_config=SimpleNamespace(**{"method": "mtp", "rejection_sample_method": "standard"} | settings),
        additional_config=settings,
        **{"drafter": None} | settings,
    )
    with pytest.raises(ValueError, match=said) as error:
        check(engine)
    assert "\n" not in str(error.value)


# By transformers' name of an architecture vLLM's class, and whether it is recurrent.
MODELS = {
    "qwen3_next": ("Qwen3NextForCausalLM", True),
    "mamba2": ("Mamba2ForCausalLM", True),
    "qwen3": ("Qwen3ForCausalLM", False),
}


@pytest.mark.parametrize("name", MODELS)
def test_drafters_that_may_pause_are_refused_for_models_with_recurrent_state(tmp_path, monkeypatch, name):
    # vLLM looks at a model's class in a process that imports vLLM once more.
    monkeypatch.setattr("vllm.model_executor.models.registry._run_in_subprocess", lambda function: function())
    architecture, is_recurrent = MODELS[name]
    AutoConfig.for_model(name, architectures=[architecture]).save_pretrained(tmp_path)
    model = ModelConfig(str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16")
    refused = pytest.raises(ValueError, match=f"no drafts for {name}, .*set speculation=off")
    for method in plugin.MAY_PAUSE:
        with refused if is_recurrent else contextlib.nullcontext():
            plugin.check_recurrent_state(model, method)
    for method in (None, "mtp"):
        plugin.check_recurrent_state(model, method)


@pytest.mark.parametrize(
    ("across", "tokens", "largest"),
    [
        ([24, 24, 24], 18, 0),  # 20 with sequence parallelism, and then the graph of 24: its own
        ([24, 24, 24], 13, 24),  # its own are 16: another one has 24
        ([5, 24, 40], 24, 40),
        (None, 24, 0),  # the ranks agreed on nothing
    ],
)
def test_a_rank_does_not_take_its_own_rows_for_those_of_others(across, tokens, largest):
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=3, data_parallel_rank=1),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[8, 16, 24, 32]),
    )
    runner = SimpleNamespace(vllm_config=config, _pad_for_sequence_parallelism=lambda rows: -(-rows // 4) * 4)
    agreed = across and SimpleNamespace(tolist=lambda: across)
    runner._determine_batch_execution_and_padding = lambda num_tokens: (0, 1, 2, agreed, 4)
    ranks.keep_other_ranks_tokens(runner)
    assert runner._determine_batch_execution_and_padding(num_tokens=tokens) == (0, 1, 2, agreed, 4)
    assert runner.sam_max_num_tokens_other_dp_ranks == largest
