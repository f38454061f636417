"""A draft model on several tensor-parallel ranks: the first decides when it runs, and tells the others which passes.

Each rank has a part of the draft model's weights and of its KV cache, so that a pass takes all of them. What decides is
on the first rank alone: policy, clock, acceptance, sam's texts, and the notes of written blocks. The batch, its tokens
and its blocks are the same on all ranks, and so are the logits, which vLLM gathers on each: an order is a few numbers,
one message a step through vLLM's own channel on the host.
"""

import contextlib
import logging
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed

from sam.switch.policy import StepState
from sam.vllm.proposer import StepResult
from sam.vllm.tracked_requests import TrackedBatch
from sam.vllm.trained.passes import Chosen, ModelPasses

logger = logging.getLogger(__name__)

# Within which a fault that all ranks have in common has come to each.
COMMON_FAULT = timedelta(seconds=30)
REFUSED = {
    "pipeline_parallel_size": "a draft model's passes are not built for stages",
    "data_parallel_size": "with experts these ranks take every forward pass together, but switch at different times",
    "prefill_context_parallel_size": "a draft model's passes do not split texts over ranks",
    "decode_context_parallel_size": "a draft model's passes do not split texts over ranks",
}


def check_ranks(parallel, is_asynchronous: bool) -> None:
    """Refuse ranks that could not run a draft model's passes together.

    Args:
        parallel: vLLM's ParallelConfig. Data-parallel engines of a dense model are independent: each has a size of 1.

    Raises:
        ValueError: names the setting, the reason and what to set instead.
    """
    for name, reason in REFUSED.items():
        if (size := getattr(parallel, name, 1)) != 1:
            raise ValueError(f"{name}={size}: {reason}: set it to 1, or speculation=sam")
    if (size := parallel.tensor_parallel_size) == 1:
        return
    if parallel.distributed_executor_backend == "external_launcher":
        raise ValueError(
            f"tensor_parallel_size={size} with distributed_executor_backend=external_launcher: each rank has a "
            "scheduler of its own: set another backend, or speculation=sam"
        )
    if is_asynchronous:
        raise ValueError(
            f"tensor_parallel_size={size} under asynchronous scheduling: a draft model on several ranks needs the "
            "step's tokens first: set speculation.async_scheduling=off"
        )


class OrderedPasses:
    """Passes that all ranks run at once, by order of the first.

    Args:
        passes: of this rank.
        group: vLLM's GroupCoordinator of the tensor-parallel ranks.
    """

    def __init__(self, passes: ModelPasses, group: Any):
        self._passes, self._group, self._is_told = passes, group, False

    def draft(self, batch: TrackedBatch, missing: np.ndarray, count: int) -> Chosen:
        """As ModelPasses.draft, on all ranks; the first one calls it, once a step at most."""
        self._is_told = True
        self._group.broadcast_object((batch.rows, missing, count))
        with raising_on_all(self._group):
            return self._passes.draft(batch, missing, count)

    def end_step(self, last: StepResult) -> None:
        """Tell the others, who wait, that no pass was ordered in this step, and for how many more none will be."""
        if not self._is_told:
            self._group.broadcast_object((last.state.running if last.state else 0, last.valid_for_steps))
        self._is_told = False

    def follow(self, request_ids: list[str], lengths: np.ndarray, texts: np.ndarray) -> StepResult:
        """Do what the first rank orders, with what the batch has in each row; whether it orders in the next step too.

        Raises:
            Exception: of a pass, on all ranks.
        """
        order = self._group.broadcast_object()
        if len(order) == 2:
            return StepResult(StepState(order[0]), valid_for_steps=order[1])
        rows, missing, count = order
        batch = TrackedBatch(rows, [request_ids[row] for row in rows], lengths[rows], texts, *(np.zeros(0, int),) * 2)
        with raising_on_all(self._group):
            self._passes.draft(batch, missing, count)
        return StepResult()

    def agreed(self, number: int) -> int:
        """The first rank's `number`, on all ranks."""
        return self._group.broadcast_object(number)


@contextlib.contextmanager
def raising_on_all(group) -> Iterator[None]:
    """Let an exception out if it is raised on all ranks, and end this process if it is not.

    In a pass ranks wait for each other on the device. A fault of one alone leaves the others in a collective that
    nothing can end but the end of their processes. So this process ends, and vLLM then ends the engine within seconds.
    """
    try:
        yield
    except Exception:
        try:  # of gloo; of `monitored_barrier` only the first rank heeds its timeout (torch 2.11)
            torch.distributed.barrier(group=group.cpu_group, async_op=True).wait(COMMON_FAULT)
        except RuntimeError:
            logger.critical(
                "the draft model failed on rank %d alone, and the others wait for it in a pass: the engine ends. Start "
                "the run again, with speculation=sam if it happens again",
                group.rank_in_group,
                exc_info=True,
            )
            logging.shutdown()
            os._exit(1)  # the interpreter's own end waits for the other ranks too
        raise
