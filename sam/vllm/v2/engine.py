"""How an engine with the second model runner gets the drafter and the verification: which, where, and where not yet."""

import functools
import weakref
from typing import Any

from sam.config import SpeculationConfig
from sam.vllm import doors, patches, ranks


def engine_arguments(config: SpeculationConfig) -> dict[str, Any]:
    """vLLM's arguments of an engine with the second runner."""
    arguments = config.vllm_arguments(asynchronous=True)  # by the door of ngram_gpu, whichever way it is scheduled
    if config.method == "sam" and (lengths := _lengths_by_requests(config)):
        arguments["speculative_config"]["num_speculative_tokens_per_batch_size"] = lengths
    return arguments


def _lengths_by_requests(config: SpeculationConfig) -> list[tuple[int, int, int]] | None:
    """vLLM's table of draft lengths, of which it captures a graph each: first requests, last, draft tokens; None for a
    single length. Which is drafted in a step the scheduler says."""
    k, threshold = config.num_speculative_tokens, config.batch_size_threshold
    match config.policy:
        case "always":
            return None
        case "goodput":
            return [(1 + i, 1 + i, k - i) for i in range(k + 1)]
        case "threshold" if threshold > 0:
            return [(1, threshold, k), (threshold + 1, threshold + 1, 0)]
    return [(1, 1, 0)]


def is_second_runner(vllm_config) -> bool:
    """Whether vLLM runs an engine with it; older versions have none, or do not say so."""
    return bool(getattr(vllm_config, "use_v2_model_runner", False))


def take_all_sampling() -> None:
    """Let requests ask for what exact verification can and vLLM's rejection sampler cannot: min_p and logit_bias."""
    from vllm.v1.engine.input_processor import InputProcessor

    def __init__(original, processor, vllm_config, *arguments, **keywords):
        original(processor, vllm_config, *arguments, **keywords)
        config = SpeculationConfig.from_vllm(vllm_config)
        if config and (config.method, config.verification) == ("sam", "exact") and is_second_runner(vllm_config):
            patches.put(processor, "speculative_config", "take_all_sampling", None)  # read for this refusal only

    patches.wrap(InputProcessor, "__init__", "take_all_sampling", __init__)


def init_device(original, wrapper, config: SpeculationConfig) -> None:
    """Make the worker's model runner. With speculation=off it is vLLM's own in all parts.

    Raises:
        ValueError: what this runner does not do, or not yet.
    """
    if config.method == "off":
        original(wrapper)
        return
    doors.check("second")
    check_engine(wrapper.vllm_config, config)
    from vllm.v1.worker.gpu import model_runner

    patches.wrap(model_runner, "init_speculator", "make_speculator", _init_speculator)
    original(wrapper)
    runner = wrapper.worker.model_runner
    patches.before(runner, "add_requests", "make_speculator", runner.speculator.schedule)
    patches.wrap(model_runner, "AsyncOutput", "make_speculator", _keep_output)
    _SPECULATORS[id(runner.output_copy_stream)] = runner.speculator
    runner.drafter = runner.speculator  # by the first runner's name, for who shares text and says that weights are new
    if config.verification == "exact":
        patches.wrap(runner, "load_model", "install", functools.partial(_load_and_verify_exactly, runner))


# By the runner's stream of copies, which alone tells whose an AsyncOutput is.
_SPECULATORS: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def _init_speculator(original, vllm_config, device, req_states):
    config = SpeculationConfig.from_vllm(vllm_config)
    if config is None or config.method == "off":
        return original(vllm_config, device, req_states)
    from sam.vllm.v2.speculator import SamSpeculator

    return SamSpeculator(vllm_config, device)


def _keep_output(original, *arguments, **keywords):
    output = original(*arguments, **keywords)
    if speculator := _SPECULATORS.get(id(keywords.get("copy_stream"))):
        speculator.keep(output)
    return output


def _load_and_verify_exactly(runner, load_model, *arguments, **keywords):
    from sam.vllm.v2.verification import ExactVerification

    load_model(*arguments, **keywords)
    verification = ExactVerification(runner.sampler, runner.num_speculative_steps, runner.device)
    patches.put(runner, "rejection_sampler", "verify_exactly", verification)


def check_engine(vllm_config, config: SpeculationConfig) -> None:
    """Refuse what the second runner does not do with this project, or not yet.

    Raises:
        ValueError: one line with the value, what is expected, and the remedy.
    """
    parallel = vllm_config.parallel_config
    wanted = {
        "speculation": (config.method, "sam"),
        "speculation.paths": (config.paths, 1),
        "pipeline_parallel_size": (parallel.pipeline_parallel_size, 1),
        "data_parallel_size": (parallel.data_parallel_size, 1),
        "return_sampling_mask": (getattr(vllm_config.model_config, "return_sampling_mask", False), False),
        "watermark_config": (getattr(vllm_config, "watermark_config", None), None),
        "speculative_config.method": (vllm_config.speculative_config.method, "ngram_gpu"),
    }
    for key, (value, expected) in wanted.items():
        if value != expected:
            raise ValueError(
                f"{key}={value}: with vLLM's second model runner expected {expected} so far: set it so, or "
                "VLLM_USE_V2_MODEL_RUNNER=0"
            )
    own = vllm_config.scheduler_config.scheduler_cls
    reason = "the switch works in vLLM's own scheduler: leave it out, or set speculation.policy=always"
    ranks.refuse({f"scheduler_cls={own}": bool(own) and config.policy != "always"}, reason)
