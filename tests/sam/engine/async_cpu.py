"""vLLM's asynchronous scheduling on its CPU backend, which does not have it, for tests of what runs on a device.

The platform never needs it: a CPU waits for nothing. What it schedules and what the model runner does with that is the
same code as on a GPU.
"""

import contextlib
import time

import torch


class Event:
    """A device's event: `query` is False until somebody has waited for it, or for one recorded after it."""

    recorded = reached = waits = 0

    def __init__(self, *_arguments, **_keywords):
        self.place, self.seconds = 0, 0.0

    def record(self, *_stream) -> None:
        Event.recorded += 1
        self.place, self.seconds = Event.recorded, time.perf_counter()

    def elapsed_time(self, later: "Event") -> float:
        """Milliseconds between two that have been reached."""
        assert self.query() and later.query(), "a device's events have no times yet"
        return (later.seconds - self.seconds) * 1e3

    def synchronize(self) -> None:
        if self.place > Event.reached:
            Event.waits += 1
            Event.reached = self.place

    def query(self) -> bool:
        return self.place <= Event.reached

    def wait(self, *_other) -> None:
        """Nothing: the order of a CPU's operations is that of their calls."""


class Stream(Event):
    wait_stream = wait_event = Event.wait


def _without_pinning(make):
    return lambda *arguments, pin_memory=False, **keywords: make(*arguments, **keywords)


def install(monkeypatch) -> None:
    """Two repairs; undone by `monkeypatch`.

    1. Root cause: CpuPlatform.check_and_update_config (vllm/platforms/cpu.py, "async scheduling is not required on
       CPU") turns it off whatever is asked. Here it stays as the engine was asked.
    2. Root cause: CPUModelRunner has streams and events only while it is built (_torch_cuda_wrapper), and torch cannot
       pin memory without a device. Symptom: AsyncGPUModelRunnerOutput fails at torch.cuda.current_stream.
    """
    import vllm.v1.worker.cpu.shm  # noqa: F401 - it replaces torch.Event when it is imported
    import vllm.v1.worker.cpu_model_runner as cpu
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__

    def keep_scheduling(cls, config):
        asked = config.scheduler_config.async_scheduling
        check(cls, config)
        config.scheduler_config.async_scheduling = asked

    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(keep_scheduling))

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *device: Stream())
    monkeypatch.setattr(cpu, "_torch_cuda_wrapper", contextlib.nullcontext)
    for name in ("zeros", "tensor", "empty"):
        monkeypatch.setattr(torch, name, _without_pinning(getattr(torch, name)))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self, *_device: self)
