"""verl's CPU platform: what verl 0.9.1 asks of a device, answered by torch's CPU backend and gloo.

verl loads this module through the entry point group `verl.plugins` when it is imported and swallows whatever
goes wrong there, so all work is done at import time and :func:`check_installed` says whether it was. Selected
by `VERL_PLATFORM=cpu`, which `recipe.sam_dapo.launch.environment` sets for `trainer.device=cpu`.
"""

import os
import types
from contextlib import nullcontext

import psutil
import torch
import torch.distributed
from verl.plugin.platform import PlatformBase, PlatformRegistry

from recipe.sam_dapo import patches_of_verl  # noqa: F401 - registers what is replaced here
from sam.patching import wrap


class CpuDevice(str):
    """What `current_device()` returns: a device name that formats as an index.

    verl moves tensors with `.to(get_device_id())`, where torch resolves an integer to the build's accelerator
    (cuda), and also writes `f"{device_name}:{get_device_id()}"`, which must read `cpu:0`.
    """

    def __format__(self, format_spec: str) -> str:
        return "0"


def _answer(value):
    """A method that says `value`, whatever it is asked."""
    return lambda *_, **__: value


class CpuDeviceModule(types.ModuleType):
    """`torch.cpu` with the functions of `torch.cuda` that verl calls (memory in bytes, of this process)."""

    is_available = _answer(True)
    get_device_name = _answer("cpu")
    empty_cache = ipc_collect = reset_peak_memory_stats = set_device = synchronize = _answer(None)
    # verl restores the device's state after the CPU's: here they are one.
    set_rng_state = staticmethod(torch.set_rng_state)

    def __getattr__(self, name: str):
        return getattr(torch.cpu, name)

    @staticmethod
    def memory_allocated(*_) -> int:
        return psutil.Process().memory_info().rss

    memory_reserved = max_memory_allocated = max_memory_reserved = memory_allocated

    @staticmethod
    def mem_get_info(*_) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total


class CpuPlatform(PlatformBase):
    """What verl asks a platform, and what there is to say of a CPU."""

    device_name = vendor_name = "cpu"
    device_module = CpuDeviceModule("recipe.sam_dapo.tiny.platform.cpu")
    is_available = _answer(True)
    is_platform_available = _answer(False)  # selected by name only, never guessed
    current_device = _answer(CpuDevice("cpu"))
    device_count = _answer(1)
    get_device_capability = _answer((None, None))
    communication_backend_name = _answer("gloo")
    visible_devices_envvar = _answer("CUDA_VISIBLE_DEVICES")
    # verl counts only "GPU" and "NPU" when it checks a resource pool; Ray's GPU resource is purely logical.
    ray_resource_name = _answer("GPU")
    ray_noset_envvars = _answer(())
    is_ipc_supported = _answer(False)  # weights then travel to vLLM through POSIX shared memory
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    nvtx_range = _answer(nullcontext())
    set_device = synchronize = set_allocator_settings = empty_cache = _answer(None)
    profiler_start = profiler_stop = cudart = _answer(None)


def _init_process_group(original, backend=None, *args, **kwargs):
    """With each backend named once."""
    if isinstance(backend, str) and "," in backend:
        backend = ",".join(dict.fromkeys(backend.split(",")))
    return original(backend, *args, **kwargs)


def _all_reduce(original, tensor, op=torch.distributed.ReduceOp.SUM, group=None, async_op=False):
    """An average is the sum, divided."""
    if op == torch.distributed.ReduceOp.AVG and tensor.device.type == "cpu" and not async_op:
        original(tensor, op=torch.distributed.ReduceOp.SUM, group=group)
        tensor.div_(torch.distributed.get_world_size(group))
        return None
    return original(tensor, op=op, group=group, async_op=async_op)


def _install() -> None:
    PlatformRegistry.register(platform="cpu")(CpuPlatform)
    if os.environ.get("VERL_PLATFORM", "").lower() == "cpu":
        wrap(torch.distributed, "init_process_group", "drop_second_gloo", _init_process_group)
        wrap(torch.distributed, "all_reduce", "average_on_gloo", _all_reduce)


def check_installed() -> None:
    """Raise RuntimeError unless verl runs on this platform in this process."""
    from verl.plugin.platform import get_platform

    if not isinstance(get_platform(), CpuPlatform):
        raise RuntimeError(
            f"verl runs on {type(get_platform()).__name__}, expected the CPU platform: start through "
            "`sam run`, and reinstall the project (bash scripts/test.sh) if its entry points are missing"
        )


_install()
