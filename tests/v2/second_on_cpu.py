"""vLLM's second model runner on a CPU: what it needs there, before anything of vLLM is imported.

It needs Triton, whose published package has no backend for a CPU: its kernels run in Triton's interpreter, on a backend
that has nothing but a name.
"""

import functools
import os
import sys

# Of a sitecustomize.py, for processes that a test does not start itself.
ON_IMPORT = """
from tests.v2 import second_on_cpu
second_on_cpu.install_on_import()
"""
DRAFTING_ON_IMPORT = """
from tests.v2 import second_on_cpu
second_on_cpu.install_on_import(second_on_cpu.draft_there)
"""


def install() -> None:
    """In this process."""
    _name_a_backend()
    _mend_interpreter()
    _before_the_runner()
    _keep_scheduling()


def install_on_import(*further) -> None:
    """In this process, if it comes to import vLLM; scheduled as the platform has it."""
    runner = (_before_the_runner, *further)
    before = {"vllm": (_name_a_backend, _mend_interpreter), "vllm.v1.worker.gpu.model_runner": runner}

    class Finder:
        @staticmethod
        def find_spec(name, *_):
            for prepare in before.pop(name, ()):
                prepare()

    sys.meta_path.insert(0, Finder)


def draft_there() -> None:
    """The CPU is a device that drafts; by the host's kernels, whose drafts are the same."""
    import torch

    from sam.vllm.v2 import device_speculator, device_walk
    from tests.sam.engine.async_cpu import Event
    from tests.sam.vllm.walks import draft_by_host

    device_speculator.DEVICES = ["cpu"]
    device_walk.draft = draft_by_host
    torch.cuda.Event = Event


def _name_a_backend() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.backends

    class Driver:
        @staticmethod
        def is_active() -> bool:
            return True

    class Backend:
        driver = Driver
        compiler = None

    triton.backends.backends["cpu"] = Backend


def _mend_interpreter() -> None:
    """Masks of whole numbers, as compiled kernels take them, and `log1p`, which is the device library's."""
    import triton.language as tl
    import triton.language.extra.libdevice as libdevice
    from triton.runtime import interpreter

    class Builder(interpreter.InterpreterBuilder):
        def create_masked_load(self, ptrs, mask, *rest):
            return super().create_masked_load(ptrs, _of_booleans(mask), *rest)

        def create_masked_store(self, ptrs, value, mask, *rest):
            return super().create_masked_store(ptrs, value, _of_booleans(mask), *rest)

    def _of_booleans(mask):
        return interpreter.TensorHandle(mask.data.astype(bool), tl.int1)

    interpreter.interpreter_builder.__class__ = Builder
    libdevice.log1p = lambda x: tl.log(1 + x)


def _before_the_runner() -> None:
    import torch
    import vllm.v1.worker.cpu.shm  # noqa: F401  (what the CPU worker replaces for the runner)
    from vllm.v1.sample.ops import topk_topp_sampler

    # The interpreter does not know `.to` of the integers in its kernel: PyTorch's path, for stock vLLM too.
    topk_topp_sampler.HAS_TRITON = False
    torch.tensor = _without_pinning(torch.tensor)


def _without_pinning(make):
    """There is no device for which memory could be pinned."""

    @functools.wraps(make)
    def made(*arguments, pin_memory=False, **keywords):
        return make(*arguments, **keywords)

    return made


def _keep_scheduling() -> None:
    """The platform turns asynchronous scheduling off, whatever is asked."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def check_but_keep_scheduling(cls, config):
        asked = config.scheduler_config.async_scheduling
        check(cls, config)
        config.scheduler_config.async_scheduling = asked

    CpuPlatform.check_and_update_config = classmethod(check_but_keep_scheduling)
