"""How an engine with the second model runner gets the drafter and the verification."""

import functools
from typing import Any

from sam.config import SpeculationConfig
from sam.vllm import doors, patches
from sam.vllm.choice import check_second, is_second_runner


def engine_arguments(config: SpeculationConfig) -> dict[str, Any]:
    """As SpeculationConfig.vllm_arguments: a name of earlier versions."""
    return config.vllm_arguments()


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
    """Make the worker's model runner. With speculation=off it is vLLM's own in all parts, but for a CPU's repairs.

    Raises:
        ValueError: this vLLM lacks a door, or the engine asks for what this runner does not do with drafts.
    """
    is_drafting = config.method != "off"
    if is_drafting:
        doors.check("second")
        check_second(wrapper.vllm_config, config)
        from vllm.v1.worker.gpu import model_runner

        from sam.vllm import warmup_cost

        patches.wrap(model_runner, "init_speculator", "make_speculator", _init_speculator)
    open_cpu_doors()
    original(wrapper)
    runner = wrapper.worker.model_runner
    if is_drafting:
        runner.speculator.bind(runner)
        capture_drafts_of_any_length(runner)
        warmup_cost.measure_at_warm_up(runner)
    patches.wrap(runner, "load_model", "install", functools.partial(_load_and_install, runner, config))


def capture_drafts_of_any_length(runner) -> None:
    """Capture each step as a whole graph, however many drafts each request has; those of one token a request where
    attention does not take any lengths. Only in vLLM's default mode."""
    from vllm.config import CUDAGraphMode

    compilation = runner.compilation_config
    name = "capture_drafts_of_any_length"

    def initialize_as_full(initialize, *arguments, **keywords):
        if compilation.cudagraph_mode != CUDAGraphMode.FULL_AND_PIECEWISE:
            return initialize(*arguments, **keywords)
        longest = runner.decode_query_len
        patches.put(runner, "decode_query_len", name, 1)
        compilation.cudagraph_mode = CUDAGraphMode.FULL
        try:
            return initialize(*arguments, **keywords)
        except ValueError:  # of a backend that captures nothing whole
            compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
            return initialize(*arguments, **keywords)
        finally:
            patches.put(runner, "decode_query_len", name, longest)

    patches.wrap(runner, "initialize_kv_cache", name, initialize_as_full)


def open_cpu_doors() -> None:
    """Repair on a CPU what has to be repaired before a model runner is made."""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        doors.check("cpu")
        from sam.vllm import cpu_fixes

        cpu_fixes.open_doors()


def _init_speculator(original, vllm_config, *arguments):
    config = SpeculationConfig.from_vllm(vllm_config)
    if config is None or config.method == "off":
        return original(vllm_config, *arguments)
    from sam.vllm.v2.device_speculator import make_speculator

    return make_speculator(vllm_config, config, arguments[0])


def _load_and_install(runner, config: SpeculationConfig, load_model, *arguments, **keywords) -> None:
    from vllm.platforms import current_platform

    load_model(*arguments, **keywords)
    if current_platform.is_cpu():
        from sam.vllm import cpu_fixes

        cpu_fixes.install(runner, config)
    if config.method == "off":
        return
    from sam.vllm import hooks

    hooks.notice_new_weights(runner, each_step="finish_requests")
    if config.verification == "exact":
        from sam.vllm.v2.verification import ExactVerification

        verification = ExactVerification(runner.sampler, runner.num_speculative_steps)
        patches.put(runner, "rejection_sampler", "verify_exactly", verification)
    say_what_drafts(runner, config)


def say_what_drafts(runner, config: SpeculationConfig) -> None:
    """In vLLM's log: it shows what its own loggers are told, and theirs below."""
    from vllm.logger import init_logger

    drafter = getattr(runner, "drafter", None)
    said = [f"drafter {type(drafter).__name__}", f"policy {config.policy}", f"verification {config.verification}"]
    if config.method == "sam":
        elsewhere = "the host" if config.draft_on == "host" else "the host (vLLM's first model runner)"
        said.append(f"drafts on {getattr(drafter, 'on', elsewhere)}")
    init_logger("vllm.sam").info("speculation: %s", ", ".join(said))
