"""What ranks tell each other: tensor-parallel ones the drafts of the first, data-parallel ones their numbers of tokens.

All tensor-parallel ranks run one batch, so that all have to verify the same drafts. vLLM's data-parallel ranks agree on
padding and graph mode in every step (vllm/v1/worker/dp_utils.py: padded to the largest batch, the lowest mode of all).
The token counts that they exchange for it are kept here; no collective is added. Draft tokens and requests are not told
apart.
"""

from sam.vllm import patches

NUM_TOKENS_ACROSS_DP = 3  # its place in the tuple that the model runner's method returns, vLLM 0.23


def is_drafting_rank(runner) -> bool:
    """Whether the scheduler is given this rank's drafts, which all ranks then verify.

    vLLM's executors take the output and the drafts of the first tensor-parallel rank (MultiprocExecutor, output_rank).
    So one rank drafts, and no rank's step depends on what another knows or when. With an external launcher each rank
    has a scheduler of its own, and drafts for itself.
    """
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, model_parallel_is_initialized

    parallel = runner.vllm_config.parallel_config
    alone = parallel.tensor_parallel_size == 1 or parallel.distributed_executor_backend == "external_launcher"
    return alone or not model_parallel_is_initialized() or get_tensor_model_parallel_rank() == 0


def check_async(parallel) -> None:
    """Refuse ranks that could not agree on a step's drafts under asynchronous scheduling.

    Args:
        parallel: vLLM's ParallelConfig.

    Raises:
        ValueError: names the setting, the reason and what to set instead.
    """
    if parallel.pipeline_parallel_size > 1:
        # GPUModelRunner._pp_broadcast_prev_sampled_token_ids asserts it; VllmConfig.max_concurrent_batches says that
        # this model runner "does not fully support async scheduling with PP". Can go when vLLM sends counts as well.
        obstacle = f"pipeline_parallel_size={parallel.pipeline_parallel_size}"
        reason = "vLLM's last stage sends the others one token of a request, without a place for accepted drafts"
    elif parallel.prefill_context_parallel_size > 1:
        obstacle = f"prefill_context_parallel_size={parallel.prefill_context_parallel_size}"
        reason = "drafts are sent to the ranks of tensor parallelism only"
    elif parallel.tensor_parallel_size > 1 and parallel.distributed_executor_backend == "external_launcher":
        obstacle = "distributed_executor_backend=external_launcher"
        reason = "each rank has a scheduler of its own, which leaves room for the drafts of its own rank"
    else:
        return
    raise ValueError(
        f"speculation under asynchronous scheduling with {obstacle}: {reason}: set speculation.async_scheduling=off"
    )


def tensor_parallel_group(runner):
    """vLLM's GroupCoordinator of the ranks that verify the first one's drafts; None if there is one rank.

    It carries the drafts before the step that verifies them: one `broadcast_object` for each step in which the
    scheduler left room for drafts, none in others. All ranks are given the same scheduler output, so that they agree on
    which steps these are without a word. It travels as Python's objects do between vLLM's ranks, through shared memory
    (another machine: a socket). No device takes part.
    """
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group() if runner.vllm_config.parallel_config.tensor_parallel_size > 1 else None


def keep_other_ranks_tokens(runner) -> None:
    """Keep the token count of the largest batch among the other ranks in `runner.sam_max_num_tokens_other_dp_ranks`.

    It is set anew in every step; 0 where no other rank is known to have more tokens than this one.
    """
    config = runner.vllm_config.parallel_config
    name = "_determine_batch_execution_and_padding"
    if config.data_parallel_size == 1 or not hasattr(runner, name):
        return
    runner.sam_max_num_tokens_other_dp_ranks = 0

    def determine_and_keep(determine, *args, **kwargs):
        result = determine(*args, **kwargs)
        try:
            across = result[NUM_TOKENS_ACROSS_DP].tolist()
            own = _padded(runner, kwargs["num_tokens"] if "num_tokens" in kwargs else args[0])
        except (AttributeError, IndexError, TypeError):  # the ranks agreed on nothing, or another vLLM
            across, own = [], 0
        rank = config.data_parallel_rank
        largest = max((num_tokens for other, num_tokens in enumerate(across) if other != rank), default=0)
        # Padded to the largest, or not exchanged at all (vllm-ascend, where it can do without): all are this rank's.
        is_own = bool(across) and largest == across[rank] and largest <= own
        runner.sam_max_num_tokens_other_dp_ranks = 0 if is_own else largest
        return result

    patches.wrap(runner, name, "keep_other_ranks_tokens", determine_and_keep)


def _padded(runner, num_tokens: int) -> int:
    """`num_tokens` padded as vLLM pads a rank's batch: for sequence parallelism, then to the next captured graph."""
    num_tokens = getattr(runner, "_pad_for_sequence_parallelism", int)(num_tokens)
    compilation = getattr(runner.vllm_config, "compilation_config", None)
    captured = getattr(compilation, "cudagraph_capture_sizes", None) or ()
    return min((size for size in captured if size >= num_tokens), default=num_tokens)
