"""Engines in which further paths cannot be rows of the batch. What rows do is in tests/sam/engine/test_paths.py."""

from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams

from sam.vllm.paths import rows


def test_a_cache_of_several_groups_is_refused():
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"full attention only: set speculation.paths=1"):
        rows.check_cache(KVCacheConfig(20, [], [KVCacheGroupSpec(["layer"], spec)] * 2))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"kv_transfer_config": object()}, "KV connector"),
        ({"enable_return_routed_experts": True}, "enable_return_routed_experts"),
        ({"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}, "external_launcher"),
    ],
)
def test_engines_without_such_rows_are_refused_in_one_line(settings, said):
    parallel = SimpleNamespace(**{"tensor_parallel_size": 1, "distributed_executor_backend": "mp"} | settings)
    model = SimpleNamespace(enable_return_routed_experts=settings.get("enable_return_routed_experts", False))
    config = SimpleNamespace(
        parallel_config=parallel, model_config=model, kv_transfer_config=settings.get("kv_transfer_config")
    )
    with pytest.raises(ValueError, match=said) as error:
        rows.check_engine(config)
    assert "set speculation.paths=1" in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("asked", [{"repetition_penalty": 1.1}, {"min_tokens": 3}, {"bad_words": ["a"]}, {}])
def test_requests_whose_tokens_depend_on_more_than_their_text_have_no_rows(asked):
    state = SimpleNamespace(sampling_params=SamplingParams(seed=3, **asked), prompt_token_ids=[5, 6], mm_features=[])
    assert rows.is_plain(state) == (not asked)
