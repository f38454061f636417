"""torch.npu's runtime on the CPU: streams and events that are always done, memory that is never short."""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import sys
import types
from collections import defaultdict
from unittest.mock import MagicMock

import torch

from simulator.linear import batch_invariant_linear

MEMORY = 8 << 30
STEP = 1 << 20  # what a question about free memory takes from it: vLLM wants to see memory being used


class Stream:
    """All work is done when it is called, so there is nothing to wait for."""

    npu_stream = 0

    def __init__(self, *_, **__):
        pass

    def wait_stream(self, *_):
        pass

    wait_event = synchronize = wait_stream

    def record_event(self, event=None):
        return event or Event()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class Event:
    def __init__(self, *_, **__):
        pass

    def record(self, *_):
        pass

    wait = reset = synchronize = record

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other) -> float:
        return 0.0


class _Memory:
    free = MEMORY - (2 << 30)

    @classmethod
    def info(cls, *_) -> tuple[int, int]:
        cls.free -= STEP
        return cls.free, MEMORY


@contextlib.contextmanager
def _stream_scope(_stream=None):
    yield


def _nothing(*_, **__) -> None:
    pass


def _module(name: str, **content) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
    module.__path__ = []
    vars(module).update(content)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)


def _on_cpu(function):
    """A tensor's factory: an "npu" is the CPU, and nothing is pinned, which needs a device."""

    @functools.wraps(function)
    def call(*arguments, pin_memory=None, **keywords):
        device = keywords.get("device")
        if isinstance(device, int) or str(device).startswith("npu"):
            keywords["device"] = "cpu"
        return function(*arguments, **keywords)

    return call


def install() -> None:
    import torch_npu

    # CANN's Python module and a transport library that vllm-ascend imports.
    _module("acl")
    _module("acl.rt", memcpy=_nothing)
    _module("mooncake")
    _module("mooncake.engine", TransferEngine=MagicMock())
    torch_npu._C._weak_ref_tensor = lambda tensor: tensor

    npu = torch_npu.npu
    current = Stream()
    properties = types.SimpleNamespace(
        name="Ascend910B3",
        total_memory=MEMORY,
        cube_core_num=20,
        vector_core_num=40,
        multi_processor_count=20,
        uuid="0",
    )
    values = {
        "current_device": 0,
        "device_count": 2,
        "is_available": True,
        "is_initialized": True,
        "_is_in_bad_fork": False,
        "current_stream": current,
        "default_stream": current,
        "memory_reserved": 0,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "get_device_properties": properties,
        "get_device_name": properties.name,
        "get_soc_version": 223,
        "is_current_stream_capturing": False,
    }
    for name, value in values.items():
        setattr(npu, name, lambda *_, value=value, **__: value)
    for name in ("set_stream", "synchronize", "empty_cache", "set_device", "reset_peak_memory_stats"):
        setattr(npu, name, _nothing)
    for name in ("set_compile_mode", "manual_seed", "manual_seed_all"):
        setattr(npu, name, _nothing)
    npu.Stream, npu.Event, npu.ExternalEvent = Stream, Event, Event
    npu.stream = _stream_scope
    npu.device = lambda *_: contextlib.nullcontext()
    npu.mem_get_info = _Memory.info
    npu.memory_stats = lambda *_: defaultdict(int)
    npu.graph_pool_handle = object
    npu.config = types.SimpleNamespace(allow_internal_format=False)
    npu.memory = MagicMock()

    torch.distributed.is_hccl_available = lambda: True
    backend_of = torch.distributed.ProcessGroup._get_backend
    # Only its communicator's name is asked for, by operators that fuse communication; gloo does the rest.
    hccl = types.SimpleNamespace(get_hccl_comm_name=lambda rank: f"simulated_{rank}")
    torch.distributed.ProcessGroup._get_backend = lambda group, device: (
        hccl if device.type == "npu" else backend_of(group, device)
    )
    torch.accelerator.synchronize = _nothing
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.get_memory_info = _Memory.info
    for name in ("tensor", "arange", "ones", "zeros", "full", "empty", "randint", "empty_like", "zeros_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    # As in vllm-ascend's batch-invariant mode; on a CPU few rows are multiplied by other kernels than many.
    torch.nn.functional.linear = batch_invariant_linear
    torch.Tensor.npu = lambda tensor, *_, **__: tensor
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor
