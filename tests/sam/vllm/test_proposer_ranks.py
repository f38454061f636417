"""What the proposer knows of other data-parallel ranks."""

from types import SimpleNamespace

import pytest

from tests.sam.vllm.model_runner import make_proposer


def test_the_tokens_of_other_ranks_are_those_that_vllm_exchanged():
    from sam.vllm.ranks import keep_other_ranks_tokens

    across = SimpleNamespace(tolist=lambda: [5, 40, 12])
    parallel = SimpleNamespace(data_parallel_size=3, data_parallel_rank=1)
    runner = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel))
    runner._determine_batch_execution_and_padding = lambda rows: (0, 1, 2, across, 4)
    keep_other_ranks_tokens(runner)
    keep_other_ranks_tokens(runner)
    assert runner._determine_batch_execution_and_padding(7) == (0, 1, 2, across, 4)
    assert runner.sam_max_num_tokens_other_dp_ranks == 12
    for unknown in ((0, 1, 2, None, 4), (0, 1)):
        other = SimpleNamespace(vllm_config=runner.vllm_config, _determine_batch_execution_and_padding=lambda: unknown)  # noqa: B023
        keep_other_ranks_tokens(other)
        assert (
            other._determine_batch_execution_and_padding() == unknown and other.sam_max_num_tokens_other_dp_ranks == 0
        )
    parallel.data_parallel_size = 1
    alone = SimpleNamespace(vllm_config=runner.vllm_config)
    keep_other_ranks_tokens(alone)
    assert not hasattr(alone, "sam_max_num_tokens_other_dp_ranks")


@pytest.mark.parametrize(
    "across, tokens, largest",
    [
        ([24, 24, 24], 24, 0),  # padded to this rank's own, or nobody has said anything
        ([24, 24, 24], 18, 0),  # 20 with sequence parallelism, and then the graph of 24: its own
        ([36, 36, 36], 33, 0),  # the same without a graph so large
        ([24, 24, 24], 13, 24),  # its own are 16: another one has 24
        ([48, 48, 48], 33, 48),  # no graph is so large
        ([5, 24, 12], 24, 12),
        ([5, 24, 40], 24, 40),
    ],
)
def test_a_rank_does_not_take_its_own_rows_for_those_of_others(across, tokens, largest):
    from sam.vllm.ranks import keep_other_ranks_tokens

    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=3, data_parallel_rank=1),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[8, 16, 24, 32]),
    )
    runner = SimpleNamespace(vllm_config=config, _pad_for_sequence_parallelism=lambda rows: -(-rows // 4) * 4)
    agreed = SimpleNamespace(tolist=lambda: across)
    runner._determine_batch_execution_and_padding = lambda num_tokens: (0, 1, 2, agreed, 4)
    keep_other_ranks_tokens(runner)
    runner._determine_batch_execution_and_padding(num_tokens=tokens)
    assert runner.sam_max_num_tokens_other_dp_ranks == largest


def test_a_step_is_planned_by_the_rows_before_it_and_learnt_from_by_its_own():
    proposer, planned, seen = make_proposer(), [], []
    plan = proposer.policy.plan
    proposer.policy.plan = lambda state: (planned.append(state.max_num_tokens_other_dp_ranks), plan(state))[1]
    proposer.policy.observe = lambda state, drafted, accepted, ms: seen.append(state.max_num_tokens_other_dp_ranks)
    runner = proposer._runner
    runner.add("a", [1, 2, 1, 2])
    for rows, tokens in ((7, [1]), (11, [2, 1]), (5, [2, 1])):
        runner.sam_max_num_tokens_other_dp_ranks = rows
        runner.step(proposer, ["a"], {"a": tokens})
    assert planned == [7, 11, 5] and seen == [11, 5]
