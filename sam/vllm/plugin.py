"""Entry point of vLLM's plugin group `vllm.general_plugins`: called in every vLLM process."""

from __future__ import annotations

import functools
from typing import Any


def register() -> None:
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner_classes = [GPUModelRunner]
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        from sam.vllm import cpu

        cpu.install_reloadable_weights()
        cpu.install_rejection_sampler()
        runner_classes.append(CPUModelRunner)
    for runner_class in runner_classes:
        _install_after_load(runner_class)


def _install_after_load(runner_class) -> None:
    original = runner_class.__dict__["load_model"]
    if getattr(original, "_sam", False):
        return

    @functools.wraps(original)
    def load_model(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        install(self)
        return result

    load_model._sam = True
    runner_class.load_model = load_model


def install(runner) -> None:
    from sam.vllm.sampler import ExactSampler

    settings = (runner.vllm_config.additional_config or {}).get("speculation")
    if settings is None:
        return
    if hasattr(getattr(runner, "drafter", None), "bind"):
        runner.drafter.bind(runner)
    if settings["verification"] == "exact" and not isinstance(getattr(runner, "_sample", None), ExactSampler):
        runner._sample = ExactSampler(runner)


def installed(runner) -> dict[str, Any]:
    from sam.vllm.sampler import ExactSampler

    drafter = getattr(runner, "drafter", None)
    return {
        "drafter": type(drafter).__name__ if drafter is not None else None,
        "verification": "exact" if isinstance(runner._sample, ExactSampler) else "standard",
    }
