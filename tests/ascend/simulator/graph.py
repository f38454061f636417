"""ACL graphs on the CPU: what is called during a capture is recorded, and called again at every replay.

As on the device a replay stops at an external event until that is recorded, and the attention's arguments, which
change from step to step, are updated through task groups in between. A replay whose update never came is an error
here; a device would hang.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import torch
from torch.distributed import Work
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten

from tests.ascend.simulator import experts, launches, operators, runtime


@dataclass
class _Call:
    name: str
    function: object
    arguments: tuple
    keywords: dict
    output: object

    def repeat(self) -> None:
        new = self.function(*self.arguments, **self.keywords)
        for one in tree_flatten(new)[0]:
            if isinstance(one, torch.ScriptObject):  # what ranks tell each other: Python waited for it in the capture
                Work.unbox(one).wait()
        for old, fresh in zip(tree_flatten(self.output)[0], tree_flatten(new)[0], strict=True):
            if isinstance(old, torch.Tensor) and old.data_ptr() != fresh.data_ptr() and old.numel():
                old.copy_(fresh)


class _State:
    recording: NPUGraph | None = None
    updating: tuple | None = None  # graph, first step, end
    under_way: list = []  # replays that wait for an event


class NPUGraph:
    def __init__(self):
        self.steps: list = []

    def replay(self) -> None:
        launches.count(launches.signature(self.steps))
        if _State.under_way:
            raise RuntimeError("the replay before this one still waits for its attention's arguments")
        _State.under_way.append(self._run())
        _go_on()

    def _run(self):
        for step in self.steps:
            if isinstance(step, _Call):
                step.repeat()
            elif step[0] == "wait":
                while not step[1].is_set:
                    yield
            else:
                step[1].is_set = False


def _go_on() -> None:
    while _State.under_way:
        try:
            with launches.inside():
                next(_State.under_way[0])
        except StopIteration:
            _State.under_way.pop(0)
            continue
        return


class ExternalEvent(runtime.Event):
    is_set = False

    def wait(self, *_):
        if _State.recording is not None:
            _State.recording.steps.append(("wait", self))

    def reset(self, *_):
        if _State.recording is not None:
            _State.recording.steps.append(("reset", self))
        else:
            self.is_set = False

    def record(self, *_):
        self.is_set = True
        _go_on()


class _Recorder(launches.Watching):
    def __init__(self, graph: NPUGraph, whole: tuple[str, ...]):
        super().__init__()
        self.graph, self.whole = graph, whole

    def see(self, func, args, kwargs):
        _State.recording = None  # what it calls is its own
        output = func(*args, **kwargs)
        _State.recording = self.graph
        self.graph.steps.append(_Call(func.name(), func, args, kwargs, output))
        return output


@contextlib.contextmanager
def capture(graph: NPUGraph, pool=None, whole: tuple[str, ...] = (), **_):
    """`whole`: vLLM's operators that are recorded as one call, not as what they are made of."""
    if _State.recording is not None:
        raise RuntimeError("a capture within a capture")
    _State.recording = graph
    try:
        with _Recorder(graph, whole):
            yield
    finally:
        _State.recording = None


def task_group_begin(_stream) -> None:
    _State.recording.first_of_group = len(_State.recording.steps)


def task_group_end(_stream) -> tuple:
    graph = _State.recording
    return graph, graph.first_of_group, len(graph.steps)


def task_update_begin(_stream, handle) -> None:
    _State.updating = handle


def task_update_end(_stream) -> None:
    _State.updating = None


def _recorded(name: str, function):
    """A Python-level operator: recorded as one call during a capture, replaced during an update."""

    def call(*arguments, **keywords):
        if _State.updating is not None:
            launches.count(f"update of {name}")
            graph, first, end = _State.updating
            (step,) = [s for s in graph.steps[first:end] if isinstance(s, _Call) and s.name == name]
            step.arguments, step.keywords = arguments, keywords
            return None
        if _State.recording is None:
            return function(*arguments, **keywords)
        with _disable_current_modes():
            output = function(*arguments, **keywords)
        _State.recording.steps.append(_Call(name, function, arguments, keywords, output))
        return output

    return call


class _Attention:
    """torch_npu.npu_fused_infer_attention_score, which is called both as a function and by its `out` variant."""

    def __init__(self, function):
        self._function = _recorded("npu_fused_infer_attention_score", function)

        def into(*, out, workspace=None, query, **keywords):
            result, _ = function(query=query, **keywords)
            out[0].copy_(result.view_as(out[0]))

        self.out = _recorded("npu_fused_infer_attention_score.out", into)

    def __call__(self, *arguments, **keywords):
        return self._function(*arguments, **keywords)


def install() -> None:
    import torch_npu

    npu = torch_npu.npu
    npu.NPUGraph, npu.graph, npu.ExternalEvent = NPUGraph, capture, ExternalEvent
    npu.graph_task_group_begin, npu.graph_task_group_end = task_group_begin, task_group_end
    npu.graph_task_update_begin, npu.graph_task_update_end = task_update_begin, task_update_end
    npu.is_current_stream_capturing = lambda: _State.recording is not None
    attention = _Attention(torch_npu.npu_fused_infer_attention_score)
    for function in operators.OPERATORS:
        name = function.__name__
        setattr(torch_npu, name, _recorded(name, getattr(torch_npu, name)))
    for owner, functions in ((torch_npu, experts.FUSED), (torch.ops._C_ascend, experts.OWN_KERNELS)):
        for function in functions:
            setattr(owner, function.__name__, _recorded(function.__name__, function))
    torch_npu.npu_fused_infer_attention_score = attention
    torch_npu._npu_fused_infer_attention_score_get_max_workspace = lambda **_: torch.empty(1)
