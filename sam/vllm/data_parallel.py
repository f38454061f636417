"""How many tokens the other data-parallel ranks run: they all wait for the fullest.

vLLM's ranks agree on padding and graph mode in every step anyway (vllm/v1/worker/dp_utils.py: padded to the largest,
the lowest mode of all); what they told each other is kept here. No collective is added. Drafts are not told apart from
requests.
"""

from __future__ import annotations

from collections.abc import Sequence

ACROSS = 3  # place of num_tokens_across_dp in what the model runner's method returns, vLLM 0.23


def follow_ranks(runner) -> None:
    """Keep the largest token count of the other ranks in `runner.sam_rows_elsewhere`, from step to step; 0 if none is
    known to have more than this rank."""
    config = runner.vllm_config.parallel_config
    determine = getattr(runner, "_determine_batch_execution_and_padding", None)
    if config.data_parallel_size == 1 or determine is None or hasattr(runner, "sam_rows_elsewhere"):
        return
    runner.sam_rows_elsewhere = 0

    def determine_and_keep(*args, **kwargs):
        result = determine(*args, **kwargs)
        try:
            across = result[ACROSS].tolist()
            own = padded(runner, kwargs["num_tokens"] if "num_tokens" in kwargs else args[0])
        except (AttributeError, IndexError, TypeError):  # nothing was agreed on, or another vLLM
            across, own = [], 0
        runner.sam_rows_elsewhere = most_elsewhere(across, config.data_parallel_rank, own)
        return result

    runner._determine_batch_execution_and_padding = determine_and_keep


def most_elsewhere(across: Sequence[int], rank: int, own: int) -> int:
    """The largest of `across` but for this rank's; `own` is what this rank brought with it, padded."""
    most = max((rows for other, rows in enumerate(across) if other != rank), default=0)
    # Padded to the largest, or not agreed on at all (vllm-ascend, where it can do without): all have this rank's own.
    return 0 if across and most == across[rank] and most <= own else most


def padded(runner, rows: int) -> int:
    """The tokens that a rank asks for when it has so many: up to the next captured graph."""
    rows = getattr(runner, "_pad_for_sequence_parallelism", int)(rows)
    compilation = getattr(runner.vllm_config, "compilation_config", None)
    captured = getattr(compilation, "cudagraph_capture_sizes", None) or ()
    return min((size for size in captured if size >= rows), default=rows)
