"""A draft model on several tensor-parallel ranks: the first decides when it runs, and tells the others which passes.

Each rank has a part of the draft model's weights and of its KV cache, so that a pass takes all of them. What decides is
on the first rank alone: policy, clock, acceptance, sam's texts, and the notes of written blocks. The batch, its tokens
and its blocks are the same on all ranks, and so are the logits, which vLLM gathers on each: an order is a few numbers.
"""

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import numpy as np

from sam.switch.policy import StepState
from sam.vllm.proposer import SamProposer, StepResult

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
        is_asynchronous: whether the engine is scheduled asynchronously.

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


@dataclass(frozen=True)
class Order:
    """What the first rank tells the others after a step.

    Attributes:
        passes: of the draft model, one for each draft token; 0: it does not run.
        rows: of the batch, those that draft.
        missing: for each of them the tokens that its first pass reads.
        quiet_steps: further steps after which nothing is told, and nothing runs, as long as `running` requests do.
        running: requests.
    """

    passes: int = 0
    rows: Sequence[int] = ()
    missing: Sequence[int] = ()
    quiet_steps: int = 0
    running: int = 0

    def encode(self) -> bytes:
        """12 bytes, and 8 for each row.

        Example:
            >>> Order.decode(Order(passes=2, rows=[0, 3], missing=[1, 40]).encode())
            Order(passes=2, rows=[0, 3], missing=[1, 40], quiet_steps=0, running=0)
        """
        numbers = [self.passes, self.quiet_steps, self.running, *self.rows, *self.missing]
        return np.array(numbers, np.int32).tobytes()

    @classmethod
    def decode(cls, message: bytes) -> Self:
        """The order that `encode` gave."""
        passes, quiet_steps, running, *rest = np.frombuffer(message, np.int32).tolist()
        half = len(rest) // 2
        return cls(passes, rest[:half], rest[half:], quiet_steps, running)


class FirstRankDecides(SamProposer):
    """A SamProposer whose first rank orders a draft model's passes, which all ranks run; a base after it has `draft`.

    After each step there is one message, through vLLM's own channel on the host, but for the steps of which the last
    one said that nothing runs. All ranks know by themselves which these are.
    """

    _group = None  # vLLM's GroupCoordinator of the tensor-parallel ranks; None: there is one
    _is_told = True  # whether the other ranks know what comes after this step

    def bind(self, runner) -> None:
        """As SamProposer's; the ranks are known then."""
        super().bind(runner)
        if runner.vllm_config.parallel_config.tensor_parallel_size > 1:
            from vllm.distributed.parallel_state import get_tp_group

            self._group = get_tp_group()

    def agreed(self, number: int) -> int:
        """The first rank's `number`, on all ranks."""
        return number if self._group is None else self._group.broadcast_object(number)

    def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=None) -> list[list[int]]:
        """As SamProposer's; the other ranks run what the first one orders, and return no drafts."""
        given = sampled_token_ids, num_tokens_no_spec, token_ids_cpu
        if self._group is None:
            return super().propose(*given)
        if not self.is_drafting_rank:
            self._follow(len(sampled_token_ids), num_tokens_no_spec, token_ids_cpu)
            return [[] for _ in sampled_token_ids]
        self._is_told = self.last.holds(len(sampled_token_ids))
        try:
            return super().propose(*given)
        finally:  # whatever went wrong: the others wait
            if not self._is_told:
                running = self.last.state.running if self.last.state else 0
                self._tell(Order(quiet_steps=self.last.valid_for_steps, running=running))

    def run_passes(self, request_ids, rows: list[int], lengths, missing: np.ndarray, texts, passes: int):
        """`draft`, with these arguments, on all ranks at once; the first rank calls it."""
        given = request_ids, rows, lengths, missing, texts, passes
        if self._group is None:
            return self.draft(*given)
        self._tell(Order(passes, rows, missing.tolist()))
        with raising_on_all(self._group):
            return self.draft(*given)

    def _tell(self, order: Order) -> None:
        self._is_told = True
        self._group.broadcast_object(order.encode())

    def _follow(self, running: int, num_tokens_no_spec, token_ids_cpu) -> None:
        if self.last.holds(running):
            self.last.valid_for_steps -= 1
            return
        order = Order.decode(self._group.broadcast_object())
        self.last = StepResult(StepState(order.running), valid_for_steps=order.quiet_steps)
        if order.passes == 0:
            return
        try:
            with raising_on_all(self._group):
                names = [self._runner.input_batch.req_ids[row] for row in order.rows]
                lengths, missing = num_tokens_no_spec[order.rows], np.array(order.missing)
                self.draft(names, order.rows, lengths, missing, token_ids_cpu, order.passes)
        except Exception:
            self.count_model_error()


@contextlib.contextmanager
def raising_on_all(group) -> Iterator[None]:
    """Let an exception out if it is raised on all ranks, and end this process if it is not.

    In a pass ranks wait for each other on the device. A fault of one alone leaves the others in a collective that
    nothing can end but the end of their processes. So this process ends, and vLLM then ends the engine within seconds.
    Without an exception it costs nothing.
    """
    try:
        yield
    except Exception:
        if all_are_here(group):
            raise
        logger.critical(
            "the draft model failed on rank %d alone, and the others wait for it in a pass: the engine ends. Start the "
            "run again, with speculation=sam if it happens again",
            group.rank_in_group,
            exc_info=True,
        )
        logging.shutdown()
        os._exit(1)  # the interpreter's own end waits for the other ranks too


def all_are_here(group) -> bool:
    """Whether all ranks call this within `COMMON_FAULT`; it takes gloo, which vLLM has beside the device's group.

    Not `monitored_barrier`: of its ranks only the first heeds its timeout (torch 2.11).
    """
    import torch.distributed

    try:
        torch.distributed.barrier(group=group.cpu_group, async_op=True).wait(COMMON_FAULT)
    except RuntimeError:
        return False
    return True
