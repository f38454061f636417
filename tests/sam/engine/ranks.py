"""What the workers of an engine with tensor-parallel ranks count and do."""

import multiprocessing
import time
from collections import Counter

import numpy as np
import pytest

from sam.switch.policy import Plan
from tests.sam.engine import async_cpu
from tests.sam.engine.tiny_engine import VOCABULARY

SLOWER_SECONDS = 0.003

if multiprocessing.parent_process() is not None:  # in the worker; the fixture `asynchronous` does it elsewhere
    async_cpu.install(pytest.MonkeyPatch())


class SamRanks:
    """Mixed into vLLM's worker; the methods are called through `collective_rpc`."""

    def prepare(self) -> None:
        """Count what each step takes, attach a recorder, and give the second rank's drafter another text."""
        from vllm.distributed.parallel_state import get_tp_group

        from sam.vllm.step_recorder import StepRecorder

        runner, group = self.model_runner, get_tp_group()
        proposer = runner.drafter
        self._slow_rank, self._steps = None, []
        StepRecorder.attach(runner)
        if self.rank == 1:
            proposer.drafter.start("other text", np.arange(VOCABULARY, dtype=np.int32))
        execute, sample, broadcast = runner.execute_model, runner.sample_tokens, group.broadcast_object

        def execute_model(scheduler_output, *arguments):
            if self.rank == self._slow_rank:
                time.sleep(SLOWER_SECONDS)
            self._steps.append(Counter(room=bool(scheduler_output.scheduled_spec_decode_tokens)))
            return counting_waits(execute)(scheduler_output, *arguments)

        def counting_waits(function):
            def call(*arguments):
                before = proposer.counters.get("waited_steps", 0)
                result = function(*arguments)
                self._steps[-1]["waits"] += proposer.counters.get("waited_steps", 0) - before
                return result

            return call

        def broadcast_object(*arguments):
            self._steps[-1]["messages"] += 1
            return broadcast(*arguments)

        runner.execute_model = execute_model
        runner.sample_tokens = counting_waits(sample)
        group.broadcast_object = broadcast_object

    def draft(self, when: str, slow_rank: int) -> None:
        """Draft always, never, or in some steps and not in others; make one rank slow."""
        policy, generator = self.model_runner.drafter.policy, np.random.default_rng(0)
        budgets = {"always": lambda: 3, "never": lambda: 0, "at times": lambda: 3 * int(generator.random() < 0.7)}
        policy.plan = lambda state: Plan(budget=budgets[when]())
        self._slow_rank = slow_rank

    def break_drafting(self) -> None:
        self.model_runner.drafter.drafter.draft = None

    def take(self) -> tuple[dict[str, int], list[dict[str, int]], str]:
        """Counters of the drafter, what each step since the last call took, and the drafter's class."""
        steps, self._steps = self._steps, []
        drafter = self.model_runner.drafter
        return dict(drafter.counters), [dict(step) for step in steps], type(drafter).__name__
