"""Which model runner an engine with this project's drafter gets, and how it is scheduled: as vLLM chooses without one.

Root cause: vLLM knows `{"model": "sam.SamProposer"}` as a drafter of the user's (`custom_class`), for which it takes
its first model runner and schedules synchronously. Symptom: with drafts an engine is another one than without.
"""

from sam.config import SpeculationConfig
from sam.vllm import doors, patches, ranks

# Methods of vLLM's.
DRAFTS = "custom_class"
SCHEDULED_AHEAD = "ngram_gpu"  # for which it schedules asynchronously


def choose_as_stock() -> None:
    """Let vLLM choose as if nothing was drafted."""
    from vllm.config import VllmConfig

    patches.wrap(VllmConfig, "__post_init__", "choose_as_stock", _post_init)
    if not doors.missing("second"):
        patches.wrap(VllmConfig, "_get_v2_model_runner_unsupported_features", "choose_as_stock", _unsupported)


def is_second_runner(vllm_config) -> bool:
    """Whether vLLM runs an engine with its second model runner; older versions have none, or do not say so."""
    return bool(getattr(vllm_config, "use_v2_model_runner", False))


def _config(vllm_config) -> SpeculationConfig | None:
    """What is asked of this project; None, too, where that is wrong: the worker says so in a line of its own."""
    try:
        return SpeculationConfig.from_vllm(vllm_config)
    except ValueError:
        return None


def _drafts(vllm_config) -> bool:
    config = _config(vllm_config)
    speculative = vllm_config.speculative_config
    return bool(config) and config.method == "sam" and speculative is not None and speculative.method == DRAFTS


def _post_init(original, vllm_config, *arguments) -> None:
    """vLLM's, which asks the method whether the engine may be scheduled asynchronously."""
    if not _drafts(vllm_config):
        original(vllm_config, *arguments)
        return
    parallel = vllm_config.parallel_config
    apart = ranks.several(parallel, "pipeline", "prefill_context") | ranks.launched_apart(parallel)
    if not any(apart.values()) and _config(vllm_config).async_scheduling != "off":
        vllm_config.speculative_config.method = SCHEDULED_AHEAD
    try:
        original(vllm_config, *arguments)
    finally:
        if not vllm_config.scheduler_config.async_scheduling:
            vllm_config.speculative_config.method = DRAFTS


def check_second(vllm_config, config: SpeculationConfig) -> None:
    """Refuse what the second model runner does not do with this project: a user has asked for that runner.

    Raises:
        ValueError: one line with the setting and the remedy.
    """
    reason = "with drafts vLLM's first model runner alone does it: leave it out, or unset VLLM_USE_V2_MODEL_RUNNER"
    ranks.refuse(_not_yet(vllm_config, config), reason)


def _unsupported(original, vllm_config) -> list[str]:
    """What the second model runner cannot do for an engine: not drafts, but what they need and it does not have."""
    from vllm import envs

    features = original(vllm_config)
    config = _config(vllm_config)
    if config is None or config.method == "off":
        return features
    if config.method == "sam" and vllm_config.speculative_config is not None:
        features = [feature for feature in features if "specul" not in feature]
    if envs.VLLM_USE_V2_MODEL_RUNNER:  # it is taken whatever this says: `check_second` has a line of its own
        return features
    return features + [name for name, is_asked in _not_yet(vllm_config, config).items() if is_asked]


def _not_yet(vllm_config, config: SpeculationConfig) -> dict[str, bool]:
    """Settings, and whether they ask for what this project does in the first runner alone."""
    asked = {
        f"speculation={config.method}": config.method != "sam",
        f"speculation.paths={config.paths}": config.paths > 1,
        "return_sampling_mask": getattr(vllm_config.model_config, "return_sampling_mask", False),
        "watermark_config": getattr(vllm_config, "watermark_config", None) is not None,
    }
    return asked | ranks.several(vllm_config.parallel_config, "pipeline", "data", "prefill_context", "decode_context")
