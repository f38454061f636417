"""How many tokens the other data-parallel ranks run: they all wait for the fullest, so that many cost nothing.

vLLM's ranks agree on padding and graph mode in every step anyway (vllm/v1/worker/dp_utils.py: padded to the largest,
the lowest mode of all); what they told each other is kept here. No collective is added.
"""

from __future__ import annotations

ACROSS = 3  # place of num_tokens_across_dp in what the model runner's method returns, vLLM 0.23


def follow_ranks(runner) -> None:
    """Keep the largest token count of the other ranks in `runner.sam_rows_elsewhere`, from step to step."""
    config = runner.vllm_config.parallel_config
    determine = getattr(runner, "_determine_batch_execution_and_padding", None)
    if config.data_parallel_size == 1 or determine is None or hasattr(runner, "sam_rows_elsewhere"):
        return
    runner.sam_rows_elsewhere = 0

    def determine_and_keep(*args, **kwargs):
        result = determine(*args, **kwargs)
        try:
            across = result[ACROSS].tolist()
        except (AttributeError, IndexError, TypeError):  # nothing was agreed on, or another vLLM
            across = []
        others = [rows for rank, rows in enumerate(across) if rank != config.data_parallel_rank]
        runner.sam_rows_elsewhere = max(others, default=0)
        return result

    runner._determine_batch_execution_and_padding = determine_and_keep
