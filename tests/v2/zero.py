"""What steps without drafts schedule, compute and copy: with `sam` as much as stock vLLM's."""

from collections import Counter

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.sam.engine.tiny_engine import PROMPTS
from tests.v2.engines import engine


class Operators(TorchDispatchMode):
    """Counts the operators that are called."""

    def __init__(self):
        super().__init__()
        self.called = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.called[function.name()] += 1
        return function(*args, **kwargs or {})


def work_of_steps(own) -> list[tuple]:
    """Of each step what was scheduled of a request, blocks of the cache too, and which operators were called."""
    core = own.llm.llm_engine
    scheduler = core.engine_core.engine_core.scheduler
    schedule = scheduler.schedule
    step = core.step
    steps = []

    def noted(*arguments):
        scheduled = schedule(*arguments)
        drafts = sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
        steps.append((scheduled.total_num_scheduled_tokens, drafts, scheduler.kv_cache_manager.usage))
        return scheduled

    def counted():
        with Operators() as operators:
            outputs = step()
        steps.append(operators.called)
        return outputs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "schedule", noted)
        patch.setattr(core, "step", counted)
        own.generate(PROMPTS[:3], [{"seed": row, "max_tokens": 8} for row in range(3)], logprobs=None)
    return steps


def works(model, is_asynchronous: bool) -> list[list[tuple]]:
    """Of stock vLLM and of `sam` that never drafts: the work of their steps."""
    both = []
    for method in (None, "sam"):
        speculation = {"policy": "never", "batch_invariant": "off"}  # with vLLM's own linear layers
        with engine(model, method, speculation, asynchronous=is_asynchronous) as own:
            own.generate(PROMPTS[:1], [{"max_tokens": 2}])
            both.append(work_of_steps(own))
    return both
