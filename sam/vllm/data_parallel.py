"""How many tokens the other data-parallel ranks run in a step: every rank waits for the largest batch.

vLLM's ranks agree on padding and graph mode in every step (vllm/v1/worker/dp_utils.py: padded to the largest batch, the
lowest mode of all). The token counts that they exchange for it are kept here; no collective is added. Draft tokens and
requests are not told apart.
"""

from collections.abc import Sequence

NUM_TOKENS_ACROSS_DP = 3  # its place in the tuple that the model runner's method returns, vLLM 0.23


def keep_other_ranks_tokens(runner) -> None:
    """Keep the token count of the largest batch among the other ranks in `runner.sam_max_num_tokens_other_dp_ranks`.

    It is set anew in every step; 0 where no other rank is known to have more tokens than this one.
    """
    config = runner.vllm_config.parallel_config
    determine = getattr(runner, "_determine_batch_execution_and_padding", None)
    if config.data_parallel_size == 1 or determine is None or hasattr(runner, "sam_max_num_tokens_other_dp_ranks"):
        return
    runner.sam_max_num_tokens_other_dp_ranks = 0

    def determine_and_keep(*args, **kwargs):
        result = determine(*args, **kwargs)
        try:
            across = result[NUM_TOKENS_ACROSS_DP].tolist()
            own = padded(runner, kwargs["num_tokens"] if "num_tokens" in kwargs else args[0])
        except (AttributeError, IndexError, TypeError):  # the ranks agreed on nothing, or another vLLM
            across, own = [], 0
        runner.sam_max_num_tokens_other_dp_ranks = max_num_tokens_other(across, config.data_parallel_rank, own)
        return result

    runner._determine_batch_execution_and_padding = determine_and_keep


def max_num_tokens_other(across: Sequence[int], rank: int, own: int) -> int:
    """The largest of `across` without this rank's; `own` is this rank's token count before the exchange, padded."""
    largest = max((num_tokens for other, num_tokens in enumerate(across) if other != rank), default=0)
    # Padded to the largest, or not exchanged at all (vllm-ascend, where it can do without): all have this rank's own.
    return 0 if across and largest == across[rank] and largest <= own else largest


def padded(runner, num_tokens: int) -> int:
    """`num_tokens` padded as vLLM pads a rank's batch: for sequence parallelism, then to the next captured graph."""
    num_tokens = getattr(runner, "_pad_for_sequence_parallelism", int)(num_tokens)
    compilation = getattr(runner.vllm_config, "compilation_config", None)
    captured = getattr(compilation, "cudagraph_capture_sizes", None) or ()
    return min((size for size in captured if size >= num_tokens), default=num_tokens)
