"""Models and requests without rows of further paths. What rows do is in tests/sam/engine/test_paths.py."""

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


@pytest.mark.parametrize("asked", [{"repetition_penalty": 1.1}, {"min_tokens": 3}, {"bad_words": ["a"]}, {}])
def test_requests_whose_tokens_depend_on_more_than_their_text_have_no_rows(asked):
    state = SimpleNamespace(sampling_params=SamplingParams(seed=3, **asked), prompt_token_ids=[5, 6], mm_features=[])
    assert rows.is_plain(state) == (not asked)
