"""Entry point of vLLM's plugin group `vllm.general_plugins`: called in every vLLM process."""

import functools
import logging
import sys
from typing import Any

from sam.config import WITH_DRAFT_MODEL, SpeculationConfig
from sam.log import show_warnings
from sam.vllm import choice, doors, patches, ranks, stopped_requests
from sam.vllm.v2 import engine as second_runner

logger = logging.getLogger(__name__)

# vLLM's names of drafters after whose steps one without drafts may follow.
MAY_PAUSE = ("custom_class", "ngram", "ngram_gpu", "suffix", "draft_model", "eagle3")
# Within the names of drafters' classes.
DRAFTERS = {
    "sam": "Sam", "ngram": "Ngram", "suffix": "Suffix", "draft_model": "TrainedProposer", "eagle3": "Eagle3Proposer"
}  # fmt: skip


def register() -> None:
    """Open the doors through which engines with a `speculation` come; any number of times.

    Nothing of vLLM's model runners is imported here: what vLLM's CPU worker replaces has to be replaced before them. An
    engine for which no speculation is configured is left as it is, and so is a vLLM without the doors.
    """
    show_warnings("sam")
    if closed := doors.problem("plugin"):
        _say_closed(closed)
        return
    from vllm.config import SchedulerConfig
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    patches.wrap(WorkerWrapperBase, "init_device", "find_speculation", _init_device)
    patches.wrap(SchedulerConfig, "get_scheduler_cls", "find_scheduler", _get_scheduler_cls)
    choice.choose_as_stock()
    if not doors.missing("second"):
        second_runner.take_all_sampling()
    stopped_requests.refuse_sessions()


@functools.cache  # vLLM loads its plugins again and again
def _say_closed(problem: str) -> None:
    logger.warning("%s; the plugin sam does nothing here, and VLLM_PLUGINS= keeps it out", problem)


def _init_device(original, wrapper) -> None:
    """Make the worker's model runner, and `install` after its load_model, where speculation is configured."""
    vllm_config = wrapper.vllm_config
    if (config := SpeculationConfig.from_vllm(vllm_config)) is None:
        return original(wrapper)
    check_lossless(vllm_config)
    check_recurrent_state(vllm_config.model_config, getattr(vllm_config.speculative_config, "method", None))
    if choice.is_second_runner(vllm_config):
        return second_runner.init_device(original, wrapper, config)
    doors.check("first")
    _open_doors(vllm_config, config)
    original(wrapper)
    runner = wrapper.worker.model_runner
    check_runner(runner)

    def load_and_install(load_model, *arguments, **keywords):
        load_model(*arguments, **keywords)
        install(runner)

    patches.wrap(runner, "load_model", "install", load_and_install)


def _get_scheduler_cls(original, scheduler_config):
    """vLLM's, which counts what stopped requests hold, with the wires of asynchronous scheduling, which do nothing
    without a drafter of ours."""
    scheduler_class = original(scheduler_config)
    stopped_requests.count_text_alone()
    if scheduler_config.async_scheduling:
        from sam.vllm import hooks

        hooks.schedule_wanted_drafts(scheduler_class)
        hooks.discard_stale_drafts(scheduler_class)
    return scheduler_class


def check_runner(runner) -> None:
    """Raise ValueError for a model runner that samples elsewhere, before it loads a model.

    Root cause: vLLM runs dense Llama, Mistral and Qwen3 models on CUDA with vllm/v1/worker/gpu, unless a feature
    that it lacks is asked for. Symptom: tokens come from vLLM's own sampler, so that on and off differ.
    """
    if not hasattr(runner, "_sample"):
        raise ValueError(
            "speculation is configured, but vLLM chose a model runner whose sampler sam.vllm does not replace, "
            f"{type(runner).__module__}: set VLLM_USE_V2_MODEL_RUNNER=0"
        )


def _open_doors(vllm_config, config: SpeculationConfig) -> None:
    """Let vLLM's model runner make this project's drafter, and on a CPU what it lacks there."""
    from vllm.platforms import current_platform

    method = getattr(vllm_config.speculative_config, "method", None)
    if method == "ngram_gpu":
        from vllm.v1.spec_decode.ngram_proposer_gpu import NgramProposerGPU

        patches.make_instead(NgramProposerGPU, "make_sam_async", _async_proposer)
    elif config.method in WITH_DRAFT_MODEL and not current_platform.is_out_of_tree():
        from sam.vllm.trained.proposer import open_doors

        open_doors()
    second_runner.open_cpu_doors()


def _async_proposer(door, vllm_config):
    """In place of vLLM's NgramProposerGPU, or vllm-ascend's, where speculation asks for `sam`."""
    config = SpeculationConfig.from_vllm(vllm_config)
    if config is None or config.method != "sam":
        return door
    from sam.vllm.async_proposer import AsyncSamProposer

    if issubclass(AsyncSamProposer, door):
        return AsyncSamProposer
    from sam.vllm import ascend

    return ascend.async_proposer(door)


def check_lossless(vllm_config) -> None:
    """Refuse settings under which accepted tokens do not follow the model's distribution."""
    additional = vllm_config.additional_config or {}
    given = additional | (additional.get("rejection_sampler_config") or {})  # vllm-ascend's, whose defaults are off
    names = [name for name in ("enable_reduce_sample", "enable_block_verify", "enable_entropy_verify") if name in given]
    lossy = {f"{name}={given[name]}": str(given[name]).lower() not in ("false", "0") for name in names}
    method = getattr(vllm_config.speculative_config, "rejection_sample_method", "standard")
    lossy[f"rejection_sample_method={method}"] = method != "standard"
    ranks.refuse(lossy, "it changes what is sampled: unset it")


def check_recurrent_state(model_config, method: str | None) -> None:
    """Refuse drafts for a model whose layers keep a state of the whole text, by vLLM's name of the drafter.

    Root cause: the step after one with drafts has to begin with the state behind the last accepted token. The builders
    of vLLM 0.23 and 0.24 (gdn_attn.py, mamba_attn.py) find it only where that step has drafts too; linear_attn.py and
    short_conv_attn.py do not know drafts at all. Symptom: other text, with an acceptance that looks well. vLLM's own
    MTP heads draft in every step. Can go with https://github.com/vllm-project/vllm/pull/56531, in 0.32.
    """
    if method in MAY_PAUSE and (model_config.is_hybrid or model_config.is_attention_free):
        raise ValueError(
            f"speculative_config: no drafts for {model_config.hf_text_config.model_type}, a model with recurrent "
            "layers, whose state vLLM loses behind accepted ones, so that the text changes: set speculation=off, "
            "or leave speculative_config out"
        )


def install(runner) -> None:
    """Bind the drafter and the sampler to a model runner, as its config says."""
    from vllm.platforms import current_platform

    from sam.vllm import hooks, warmup_cost
    from sam.vllm.exact_sampler import ExactSampler, self_check

    config = SpeculationConfig.from_vllm(runner.vllm_config)
    if current_platform.is_cpu():
        from sam.vllm import cpu_fixes

        cpu_fixes.install(runner, config)
    check_scheduling(runner, config)
    if hasattr(getattr(runner, "drafter", None), "bind"):
        runner.drafter.bind(runner)
        hooks.install(runner)
        warmup_cost.measure_at_warm_up(runner)
        ranks.keep_other_ranks_tokens(runner)
        if current_platform.is_out_of_tree():
            from sam.vllm import ascend

            ascend.capture_drafts_of_any_length(runner)
    if config.verification == "exact":
        patches.put(runner, "_sample", "sample_exactly", ExactSampler(runner))
        self_check(runner.device)
    rejection_sampler = getattr(runner, "rejection_sampler", None)
    if rejection_sampler is not None and (config.verification == "rejection" or current_platform.is_cpu()):
        hooks.verify_by_rejection(sys.modules[type(rejection_sampler).__module__])
    second_runner.say_what_drafts(runner, config)


def check_scheduling(runner, config: SpeculationConfig) -> None:
    """Refuse an engine that does not schedule as exact verification needs."""
    # vLLM's own drafters on the device: until the host hears more, all drafts count as accepted, in positions too.
    counts_optimistically = getattr(runner, "use_async_spec_decode", False) and not hasattr(runner.drafter, "bind")
    if config.verification == "exact" and counts_optimistically:
        raise ValueError(
            "verification=exact draws a token by its position, which asynchronous scheduling with vLLM's own method "
            f"{runner.speculative_config.method!r} leaves on the device: set the engine's async_scheduling=False"
        )


def installed(runner) -> dict[str, Any]:
    """What this model runner uses, before a StepRecorder is attached: drafter, verification, whether it is scheduled
    asynchronously."""
    drafter = getattr(runner, "drafter", None)
    # The second runner has no `_sample`; where nothing drafts its own sampler is all that there is.
    verifier = getattr(runner, "_sample", None) or (drafter and runner.rejection_sampler)
    is_exact = verifier is None or type(verifier).__name__ in ("ExactSampler", "ExactVerification")
    return {
        "drafter": type(drafter).__name__ if drafter is not None else None,
        "verification": "exact" if is_exact else "rejection",
        "asynchronous": bool(runner.scheduler_config.async_scheduling),
    }


def check_installed(wanted: SpeculationConfig, status: dict[str, Any]) -> None:
    """Raise RuntimeError unless a worker, whose `installed` is `status`, drafts and verifies as the config asks."""
    expected = DRAFTERS.get(wanted.trained_method())
    drafter = status["drafter"]
    is_expected = expected in (drafter or "") if expected else drafter is None
    if not is_expected or status["verification"] != wanted.verification:
        raise RuntimeError(
            f"rollout worker has drafter {drafter} and verification {status['verification']}, which are not those of "
            f"speculation={wanted.method}, verification={wanted.verification}: is the project installed where vLLM "
            "runs (pip install -e .)?"
        )
