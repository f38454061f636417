"""Entry point of vLLM's plugin group `vllm.general_plugins`: called in every vLLM process."""

import functools
import sys
from typing import Any

from sam.config import SCHEDULED_AHEAD, WITH_DRAFT_MODEL, SpeculationConfig
from sam.log import show_warnings


def register() -> None:
    """Install what the engine's `additional_config["speculation"]` asks for after each model runner's load_model.

    May be called any number of times. Without that key vLLM is left as it is, but for the repairs on CPU. On Ascend the
    model runner's own load_model calls `install`: patches/vllm_ascend.
    """
    from vllm.platforms import current_platform

    show_warnings("sam")
    if current_platform.is_out_of_tree():
        _register_on_ascend()
        return
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from sam.vllm import async_hooks
    from sam.vllm.trained.doors import open_doors

    runner_classes = [GPUModelRunner]
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_model_runner import CPUModelRunner

        from sam.vllm import cpu_fixes, cpu_linear

        cpu_linear.install()
        cpu_fixes.install_rejection_sampler()
        cpu_fixes.install_unread_generators(CPUModelRunner)
        runner_classes.append(CPUModelRunner)
    for runner_class in runner_classes:
        _after_load(runner_class, install)
    open_doors()
    async_hooks.open_ngram_gpu(_async_proposer)
    async_hooks.skip_ngram_tensors()
    async_hooks.follow_switch(AsyncScheduler)
    async_hooks.discard_stale_drafts(AsyncScheduler)
    _refuse_second_runner()


def _refuse_second_runner() -> None:
    """Refuse vLLM's second model runner where speculation is configured.

    Root cause: vLLM 0.23 runs dense Llama, Mistral and Qwen3 models on CUDA with vllm/v1/worker/gpu, which samples
    elsewhere, unless a feature it lacks is asked for. Symptom: without drafts, tokens come from vLLM's own sampler, so
    that on and off differ. Can go when ExactSampler is installed there too.
    """
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON:
        from vllm.v1.worker.gpu.model_runner import GPUModelRunner

        _after_load(GPUModelRunner, refuse)


def _async_proposer(door):
    from sam.vllm.async_proposer import AsyncSamProposer  # with torch and vLLM's drafter, where it is wanted only

    if door.__name__ == "AscendNgramProposerNPU":
        from sam.vllm.ascend.async_proposer import AscendAsyncSamProposer

        return AscendAsyncSamProposer
    return AsyncSamProposer


def _register_on_ascend() -> None:
    """The wires of asynchronous scheduling, each where it is needed: vllm-ascend's own patches come later than this."""
    from vllm.config import SchedulerConfig

    from sam.vllm import async_hooks

    async_hooks.open_ngram_gpu(_async_proposer)
    original = SchedulerConfig.get_scheduler_cls
    if getattr(original, "_sam", False):
        return

    @functools.wraps(original)
    def get_scheduler_cls(self):
        scheduler_class = original(self)
        if self.async_scheduling:
            async_hooks.follow_switch(scheduler_class)
            async_hooks.discard_stale_drafts(scheduler_class)
        return scheduler_class

    get_scheduler_cls._sam = True
    SchedulerConfig.get_scheduler_cls = get_scheduler_cls


def _after_load(runner_class, action) -> None:
    """Call `action(runner)` after load_model, which every worker calls once before its warm-up."""
    original = runner_class.__dict__["load_model"]
    if getattr(original, "_sam", False):
        return

    @functools.wraps(original)
    def load_model(self, *args, **kwargs):
        result = original(self, *args, **kwargs)
        action(self)
        return result

    load_model._sam = True
    runner_class.load_model = load_model


def refuse(runner) -> None:
    """Raise RuntimeError if speculation is configured for a model runner whose sampler is not replaced."""
    if SpeculationConfig.from_vllm(runner.vllm_config) is not None:
        raise RuntimeError(
            "speculation is configured, but vLLM chose its V2 model runner, whose sampler sam.vllm does not replace: "
            "set VLLM_USE_V2_MODEL_RUNNER=0"
        )


def check_lossless(vllm_config) -> None:
    """Refuse settings under which accepted tokens do not follow the model's distribution.

    Raises:
        ValueError: names the setting, its value and what to set instead.
    """
    additional = vllm_config.additional_config or {}
    method = getattr(vllm_config.speculative_config, "rejection_sample_method", "standard")
    if method != "standard":
        raise ValueError(f"rejection_sample_method={method} changes what is sampled: set it to standard")
    # vllm-ascend's; its defaults are off.
    ascend_sampler = additional.get("rejection_sampler_config") or {}
    if str(additional.get("enable_reduce_sample", False)).lower() not in ("false", "0"):
        raise ValueError(
            f"enable_reduce_sample={additional['enable_reduce_sample']} leaves each rank a part of the vocabulary: "
            "unset it, sam.verify samples from the whole"
        )
    for switch in ("enable_block_verify", "enable_entropy_verify"):
        if str(ascend_sampler.get(switch, False)).lower() not in ("false", "0"):
            raise ValueError(
                f"rejection_sampler_config.{switch}={ascend_sampler[switch]} changes what is sampled: unset it"
            )


def install(runner) -> None:
    """Bind the drafter and the sampler to a model runner, as its config says.

    Raises:
        ValueError: a lossy or unknown setting. RuntimeError: the self-check failed.
    """
    from vllm import envs
    from vllm.platforms import current_platform

    from sam.vllm import rejection_sampler, runner_hooks, warmup_cost
    from sam.vllm.exact_sampler import ExactSampler, self_check
    from sam.vllm.ranks import keep_other_ranks_tokens

    config = SpeculationConfig.from_vllm(runner.vllm_config)
    if current_platform.is_cpu():
        from sam.vllm import cpu_fixes, cpu_linear

        cpu_linear.pack_after_loads(runner)
        if config is None or config.batch_invariant != "off":
            cpu_fixes.install_invariant_attention()
    elif config is not None and config.batch_invariant == "on" and not envs.VLLM_BATCH_INVARIANT:
        raise ValueError(
            "speculation.batch_invariant=on: on this device only vLLM's own mode has such kernels: set "
            "VLLM_BATCH_INVARIANT=1, or speculation.batch_invariant=auto"
        )
    if config is None:
        return
    check_lossless(runner.vllm_config)
    check_scheduling(runner, config)
    if hasattr(getattr(runner, "drafter", None), "bind"):
        runner.drafter.bind(runner)
        runner_hooks.draft_near_max_model_len(runner)
        runner_hooks.skip_accepted_counts(runner)
        if not getattr(runner, "use_async_scheduling", False):
            runner_hooks.skip_empty_drafts(runner)
        if current_platform.is_out_of_tree():
            from sam.vllm import async_hooks
            from sam.vllm.ascend import graphs

            graphs.install(runner)
            async_hooks.skip_ngram_tensors()
        elif current_platform.is_cuda():
            runner_hooks.capture_drafts_of_any_length(runner)
        runner_hooks.note_waiting(runner)
        warmup_cost.measure_at_warm_up(runner)
        keep_other_ranks_tokens(runner)
    if config.verification == "exact" and not isinstance(getattr(runner, "_sample", None), ExactSampler):
        runner._sample = ExactSampler(runner)
        self_check(runner)
    if config.verification == "rejection" and runner.speculative_config is not None:
        module = sys.modules[type(runner.rejection_sampler).__module__]
        rejection_sampler.install(module)
        rejection_sampler.self_check(runner, module)


def check_scheduling(runner, config: SpeculationConfig) -> None:
    """Refuse an engine that does not schedule as `speculation.async_scheduling` asks, or as exact verification needs.

    Raises:
        ValueError: names the key and what vLLM chose.
    """
    # vLLM's own drafters on the device: until the host hears more, all drafts count as accepted, in positions too.
    counts_optimistically = getattr(runner, "use_async_spec_decode", False) and not hasattr(runner.drafter, "bind")
    if config.verification == "exact" and counts_optimistically:
        raise ValueError(
            "verification=exact draws a token by its position, which asynchronous scheduling with vLLM's own method "
            f"{runner.speculative_config.method!r} leaves on the device: set the engine's async_scheduling=False"
        )
    if config.async_scheduling == "on" and not getattr(runner, "use_async_scheduling", False):
        raise ValueError(
            f"speculation.async_scheduling=on: vLLM schedules synchronously with {type(runner).__name__}, "
            f"speculation.method={config.method}: set it to auto"
        )


def installed(runner) -> dict[str, Any]:
    """What this model runner uses: drafter, verification, whether it is scheduled asynchronously; sampled steps, rows
    without a distribution."""
    from sam.vllm import rejection_sampler
    from sam.vllm.exact_sampler import ExactSampler

    drafter = getattr(runner, "drafter", None)
    sampler = getattr(runner, "rejection_sampler", None)
    module = sys.modules[type(sampler).__module__]
    function = runner._sample if isinstance(runner._sample, ExactSampler) else getattr(module, "rejection_sample", None)
    ours = isinstance(function, ExactSampler | rejection_sampler.RejectionVerification)
    return {
        "drafter": type(drafter).__name__ if drafter is not None else None,
        "verification": "exact" if isinstance(function, ExactSampler) else "rejection",
        "asynchronous": bool(getattr(runner, "use_async_scheduling", False)),
        **({"sampled_steps": function.calls, "invalid_rows": function.invalid_rows} if ours else {}),
    }


def check_installed(wanted: SpeculationConfig, status: dict[str, Any]) -> None:
    """Raise RuntimeError unless a worker, whose `installed` is `status`, drafts and verifies as the config asks."""
    asynchronous = "Async" if _is_asynchronous(wanted, status) else ""
    drafters = {
        "sam": f"{asynchronous}SamProposer",
        "ngram": "NgramProposer",
        "suffix": "SuffixDecodingProposer",
        "off": None,
        "draft_model": f"{asynchronous}TrainedProposer",
        "eagle3": f"{asynchronous}Eagle3Proposer",
    }
    method = wanted.trained_method() if wanted.method in WITH_DRAFT_MODEL else wanted.method
    expected = {"drafter": drafters[method], "verification": wanted.verification}
    for part, name in expected.items():
        # vllm-ascend's classes carry its name in front.
        if (status.get(part) or "").removeprefix("Ascend") != (name or ""):
            raise RuntimeError(
                f"rollout worker has {part} {status.get(part)}, expected {name} for speculation="
                f"{wanted.method}: is the project installed where vLLM runs (pip install -e .)?"
            )


def scheduling_remark(wanted: SpeculationConfig, status: dict[str, Any]) -> str | None:
    """A line for the user where a drafter costs the asynchronous scheduling that vLLM has without one (not on a CPU).

    Args:
        status: what `installed` gave.
    """
    from vllm.platforms import current_platform

    if wanted.method == "off" or status["asynchronous"] or current_platform.is_cpu():
        return None
    can = wanted.method in SCHEDULED_AHEAD
    why = f"async_scheduling={wanted.async_scheduling}" if can else "vLLM does not combine the two"
    return f"speculation={wanted.method} costs asynchronous scheduling, which vLLM has without speculation ({why})"


def _is_asynchronous(wanted: SpeculationConfig, status: dict[str, Any]) -> bool:
    """Whether the drafter has to be the asynchronous one; where vLLM chooses, it is what the worker has."""
    if wanted.async_scheduling == "auto":
        return (status.get("drafter") or "").removeprefix("Ascend").startswith("Async")
    return wanted.async_scheduling == "on"
