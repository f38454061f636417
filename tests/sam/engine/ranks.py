"""What the workers of an engine with tensor-parallel ranks count and do."""

import multiprocessing
import time
from collections import Counter

import numpy as np
import pytest

from sam.switch.policies import Plan
from tests.sam.engine import async_cpu
from tests.sam.engine.tiny_engine import VOCABULARY

SLOWER_SECONDS = 0.003

if multiprocessing.parent_process() is not None:  # in the worker; the fixture `asynchronous` does it elsewhere
    async_cpu.install(pytest.MonkeyPatch())


class SamRanks:
    """Mixed into vLLM's worker; the methods are called through `collective_rpc`."""

    def prepare(self) -> None:
        """Count steps and messages, and give the second rank's drafter another text."""
        from vllm.distributed.parallel_state import get_tp_group

        runner, group = self.model_runner, get_tp_group()
        self._slow_rank, self._counted = None, Counter()
        if self.rank == 1:
            runner.drafter.drafter.start("other text", np.arange(VOCABULARY, dtype=np.int32))
        execute, broadcast = runner.execute_model, group.broadcast_object

        def execute_model(scheduler_output, *arguments):
            if self.rank == self._slow_rank:
                time.sleep(SLOWER_SECONDS)
            self._counted.update(steps=1, room=bool(scheduler_output.scheduled_spec_decode_tokens))
            return execute(scheduler_output, *arguments)

        def broadcast_object(*arguments):
            self._counted.update(messages=1)
            return broadcast(*arguments)

        runner.execute_model, group.broadcast_object = execute_model, broadcast_object

    def draft(self, when: str, slow_rank: int) -> None:
        """Draft always, never, in some steps and not in others, or with a broken drafter; make one rank slow."""
        proposer, generator = self.model_runner.drafter, np.random.default_rng(0)
        budgets = {"never": lambda: 0, "at times": lambda: 3 * int(generator.random() < 0.7)}
        proposer.policy.plan = lambda state: Plan(budget=budgets.get(when, lambda: 3)())
        if when == "broken":
            proposer.drafter.draft = None
        self._slow_rank = slow_rank

    def take(self) -> tuple[dict[str, int], dict[str, int]]:
        """Counters of the drafter; steps since the last call, those with room for drafts, messages, and waits."""
        drafter, counted, self._counted = self.model_runner.drafter, self._counted, Counter()
        waits = drafter.counters.get("waited_steps", 0)
        counted["waits"], self._waits = waits - getattr(self, "_waits", 0), waits
        names = ("steps", "room", "messages", "waits")
        return dict(drafter.counters), {name: counted[name] for name in names}
