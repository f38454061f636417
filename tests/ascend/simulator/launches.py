"""What each engine step asks of the device: operators by name, graph replays, updates of attention arguments.

An operator inside a replayed graph costs the host nothing: the replay is one launch, named after what was captured.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

OWN_KERNELS = ("npu", "atb")  # namespaces of what operators.py answers, which counts itself


class _State:
    launched: Counter = Counter()  # of the step under way
    hidden = 0  # depth of what is no launch of its own


class Watching(TorchDispatchMode):
    """Shows `see` every operator; vLLM's own, which are made of others, as those but for `whole`."""

    whole: tuple[str, ...] = ()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "vllm" and func.name() not in self.whole:
            with self:
                return func.decompose(*args, **kwargs or {})
        return self.see(func, args, kwargs or {})


class _Counting(Watching):
    def see(self, func, args, kwargs):
        if func.namespace not in OWN_KERNELS and not func.is_view:  # a view asks nothing of the device
            count(func.name())
        return func(*args, **kwargs)


def count(name: str) -> None:
    if not _State.hidden:
        _State.launched[name] += 1


@contextlib.contextmanager
def inside(name: str | None = None):
    """One launch, whatever it is made of here; none without a name."""
    if name:
        count(name)
    _State.hidden += 1
    try:
        with _disable_current_modes():
            yield
    finally:
        _State.hidden -= 1


def signature(steps: list) -> str:
    """A captured graph in words: its calls and the shapes that they write."""
    calls = []
    for step in steps:
        if name := getattr(step, "name", None):
            outputs = step.output if isinstance(step.output, tuple | list) else [step.output]
            calls.append((name, [tuple(one.shape) for one in outputs if isinstance(one, torch.Tensor)]))
    return f"graph of {len(calls)} calls {hashlib.sha256(repr(calls).encode()).hexdigest()[:12]}"


def attach(runner) -> list[dict]:
    """The steps of a model runner from now on.

    Each has `rows` (requests), `tokens`, `drafts` (draft tokens), `decodes` (no request is in its prompt), `launched`
    (operators by name, sampling included).
    """
    steps: list[dict] = []
    execute, sample = runner.execute_model, runner.sample_tokens

    def execute_model(scheduled, *arguments, **keywords):
        launched = _State.launched = Counter()
        with _Counting():
            result = execute(scheduled, *arguments, **keywords)
        if scheduled.total_num_scheduled_tokens:
            rows = [runner.requests[name] for name in scheduled.num_scheduled_tokens]
            step = {"rows": len(rows), "tokens": scheduled.total_num_scheduled_tokens, "launched": launched}
            step["drafts"] = sum(map(len, scheduled.scheduled_spec_decode_tokens.values()))
            step["decodes"] = all(one.num_computed_tokens >= one.num_prompt_tokens for one in rows)
            steps.append(step)
        return result

    def sample_tokens(*arguments, **keywords):
        with _Counting():
            return sample(*arguments, **keywords)

    runner.execute_model, runner.sample_tokens = execute_model, sample_tokens
    return steps
