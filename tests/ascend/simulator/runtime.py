"""torch.npu's runtime on the CPU: work that is done when it is called, memory that is never short."""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import sys
import types
from collections import defaultdict
from unittest.mock import MagicMock

import torch

from tests.sam.engine.async_cpu import Event
from tests.sam.engine.async_cpu import Stream as CpuStream

MEMORY = 8 << 30
STEP = 1 << 20  # what a question about free memory takes from it: vLLM wants to see memory being used
# With fewer rows the matrix libraries of a CPU take kernels whose sums round differently (seen below 16 rows with MKL).
INVARIANT_ROWS = 32


class Stream(CpuStream):
    def record_event(self, event=None):
        event = event or Event()
        event.record()
        return event


class _Memory:
    free = MEMORY

    @classmethod
    def info(cls, *_) -> tuple[int, int]:
        cls.free -= STEP
        return cls.free, MEMORY


def _nothing(*_, **__) -> None:
    pass


def _module(name: str, **content) -> None:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
    module.__path__ = []
    vars(module).update(content)
    sys.modules[name] = module


def _on_cpu(function):
    """A tensor's factory: an "npu" is the CPU, and nothing is pinned, which needs a device."""

    @functools.wraps(function)
    def call(*arguments, pin_memory=None, **keywords):
        device = keywords.get("device")
        if isinstance(device, int) or str(device).startswith("npu"):
            keywords["device"] = "cpu"
        return function(*arguments, **keywords)

    return call


def _batch_invariant(linear):
    """Rows that do not depend on how many there are, as in vllm-ascend's batch-invariant mode: few are padded."""

    def padded(x, weight, bias=None):
        rows = x.shape[0]
        if x.dim() != 2 or rows >= INVARIANT_ROWS:
            return linear(x, weight, bias)
        return linear(torch.nn.functional.pad(x, (0, 0, 0, INVARIANT_ROWS - rows)), weight, bias)[:rows]

    return padded


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
    names = {"name": "Ascend910B3", "uuid": "0"}
    cores = {"cube_core_num": 20, "vector_core_num": 40, "multi_processor_count": 20}
    properties = types.SimpleNamespace(total_memory=MEMORY, **names, **cores)
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
        "memory_stats": defaultdict(int),
        "get_device_properties": properties,
        "get_device_name": properties.name,
        "get_soc_version": 223,
        **dict.fromkeys(("set_stream", "synchronize", "empty_cache", "set_device", "reset_peak_memory_stats")),
        **dict.fromkeys(("set_compile_mode", "manual_seed", "manual_seed_all")),
    }
    for name, value in values.items():
        setattr(npu, name, lambda *_, value=value, **__: value)
    npu.Stream, npu.Event = Stream, Event
    npu.stream = npu.device = contextlib.nullcontext
    npu.mem_get_info = torch.accelerator.get_memory_info = _Memory.info
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
    for name in ("tensor", "arange", "ones", "zeros", "full", "empty", "randint", "empty_like", "zeros_like"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    # On a CPU few rows are multiplied by other kernels than many.
    torch.nn.functional.linear = _batch_invariant(torch.nn.functional.linear)
    torch.Tensor.npu = torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor
