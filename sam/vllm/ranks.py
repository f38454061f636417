"""What ranks tell each other: tensor-parallel ones the first one's drafts, data-parallel ones their tokens' numbers."""

from sam.vllm import patches


def is_drafting_rank(runner) -> bool:
    """Whether the scheduler is given this rank's drafts, which all ranks of its batch then verify.

    vLLM's executors take the drafts of the first tensor-parallel rank (MultiprocExecutor, output_rank). With an
    external launcher each rank has a scheduler of its own, and drafts for itself.
    """
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    parallel = runner.vllm_config.parallel_config
    alone = parallel.tensor_parallel_size == 1 or any(launched_apart(parallel).values())
    return alone or get_tensor_model_parallel_rank() == 0


def refuse(settings: dict[str, bool], reason: str) -> None:
    """Raise ValueError, a line with the first of the settings that is there, and why it may not be."""
    for name, is_there in settings.items():
        if is_there:
            raise ValueError(f"{name}: {reason}")


def several(parallel, *kinds: str) -> dict[str, bool]:
    """Sizes of vLLM's ParallelConfig, and whether each is above 1."""
    sizes = {f"{kind}_parallel_size": getattr(parallel, f"{kind}_parallel_size", 1) for kind in kinds}
    return {f"{name}={size}": size > 1 for name, size in sizes.items()}


def launched_apart(parallel) -> dict[str, bool]:
    """Whether each tensor-parallel rank has a scheduler of its own."""
    launcher = "external_launcher"
    is_apart = parallel.tensor_parallel_size > 1 and parallel.distributed_executor_backend == launcher
    return {f"distributed_executor_backend={launcher}": is_apart}


def check_async(parallel) -> None:
    """Refuse ranks that could not agree on a step's drafts under asynchronous scheduling, by vLLM's ParallelConfig:
    vLLM's stages send one token of a request, and context-parallel ranks are not sent the drafts."""
    reason = "drafts under asynchronous scheduling do not reach all ranks: set speculation.async_scheduling=off"
    refuse(several(parallel, "pipeline", "prefill_context") | launched_apart(parallel), reason)


def tensor_parallel_group(runner):
    """vLLM's GroupCoordinator of the ranks that verify the first one's drafts; None if there is one rank.

    One `broadcast_object` before each step in which the scheduler, whose output all are given, left room for drafts:
    through shared memory (another machine: a socket), and through no device.
    """
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group() if runner.vllm_config.parallel_config.tensor_parallel_size > 1 else None


def keep_other_ranks_tokens(runner) -> None:
    """Keep in `runner.sam_max_num_tokens_other_dp_ranks`, in every step anew, the token count of the largest batch
    among the other data-parallel ranks; 0 where none is known to have more tokens than this one.

    vLLM exchanges the counts itself, to agree on padding and graph (vllm/v1/worker/dp_utils.py).
    """
    config = runner.vllm_config.parallel_config
    name = "_determine_batch_execution_and_padding"
    if config.data_parallel_size == 1 or not hasattr(runner, name):
        return
    runner.sam_max_num_tokens_other_dp_ranks = 0

    def determine_and_keep(determine, *arguments, **keywords):
        result = determine(*arguments, **keywords)
        across = [] if result[3] is None else result[3].tolist()  # num_tokens_across_dp
        own = _padded(runner, keywords["num_tokens"] if "num_tokens" in keywords else arguments[0])
        rank = config.data_parallel_rank
        largest = max((count for other, count in enumerate(across) if other != rank), default=0)
        # Padded to the largest, or not exchanged at all (vllm-ascend, where it can do without): all are this rank's.
        is_own = bool(across) and largest == across[rank] and largest <= own
        runner.sam_max_num_tokens_other_dp_ranks = 0 if is_own else largest
        return result

    patches.wrap(runner, name, "keep_other_ranks_tokens", determine_and_keep)


def _padded(runner, num_tokens: int) -> int:
    """`num_tokens` padded as vLLM pads a rank's batch: for sequence parallelism, then to the next captured graph."""
    num_tokens = getattr(runner, "_pad_for_sequence_parallelism", int)(num_tokens)
    captured = runner.vllm_config.compilation_config.cudagraph_capture_sizes or ()
    return min((size for size in captured if size >= num_tokens), default=num_tokens)
