"""What data-parallel ranks know of each other."""

from types import SimpleNamespace

import pytest

from sam.vllm.ranks import keep_other_ranks_tokens


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
    keep_other_ranks_tokens(runner)
    assert runner._determine_batch_execution_and_padding(num_tokens=tokens) == (0, 1, 2, agreed, 4)
    assert runner.sam_max_num_tokens_other_dp_ranks == largest
