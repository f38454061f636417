"""Which drafter and which sampler would run: vLLM's own code loads them here as it would in an engine."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
from collections.abc import Iterator
from types import SimpleNamespace

from omegaconf import DictConfig, OmegaConf

from recipe.launch import source_patches
from recipe.preflight.problem import Problem

PLUGINS = "vllm.general_plugins"
ASCEND_RUNNER = "vllm_ascend.worker.model_runner_v1.NPUModelRunner"
VLLM_RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
# vLLM's own drafters, by the method that its SpeculativeConfig settles on.
VLLM_DRAFTERS = {
    "ngram": "vllm.v1.spec_decode.ngram_proposer.NgramProposer",
    "suffix": "vllm.v1.spec_decode.suffix_decoding.SuffixDecodingProposer",
}


def resolve(config: DictConfig) -> tuple[dict[str, str], list[Problem]]:
    """`drafter` and `sampler` in words, and what is wrong with them. Imports vLLM."""
    problems: list[Problem] = []
    found = {}
    for part, name in ((_drafter, "drafter"), (_sampler, "sampler")):
        try:
            found[name] = part(config)
        except Exception as error:  # vLLM's, and whatever a drafter's import raises
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            problems.append(Problem("drafter.load", f"the {name} would not load: {reason}"))
            found[name] = "would not load"
    return found, problems


def _settings(config: DictConfig) -> dict:
    return OmegaConf.to_container(config.actor_rollout_ref.rollout.engine_kwargs.vllm)


def _drafter(config: DictConfig) -> str:
    """Read by vLLM's SpeculativeConfig and, where it is a class, made by the function that vLLM calls."""
    settings = _settings(config)
    if not (asked := settings.get("speculative_config")):
        return "none"
    from vllm.config.speculative import SpeculativeConfig
    from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer

    speculative = SpeculativeConfig(**asked)
    if speculative.method != "custom_class":
        return f"{VLLM_DRAFTERS.get(speculative.method, speculative.method)}, vLLM's own"
    longest = config.data.max_prompt_length + config.data.max_response_length
    engine = SimpleNamespace(
        speculative_config=speculative,
        additional_config=settings.get("additional_config"),
        model_config=SimpleNamespace(max_model_len=config.actor_rollout_ref.rollout.max_model_len or longest),
    )
    made = create_custom_proposer(engine)
    by = create_custom_proposer.__module__
    if config.trainer.device == "npu":
        by += f", which vllm_ascend.spec_decode calls {_ascend_state()}"
    return f"{type(made).__module__}.{type(made).__qualname__}, made by {by}"


def _ascend_state() -> str:
    """By the hashes of the patched files: to import vllm-ascend's parts one by one needs an NPU's process around them.

    Raises:
        RuntimeError: it is installed and would not call this project.
    """
    for series in source_patches.load():
        if problem := series.problem():
            raise RuntimeError(problem)
        if series.state == "absent":
            return "once vllm-ascend is installed and patched"
    return "as patched"


def _sampler(config: DictConfig) -> str:
    if "speculation" not in (_settings(config).get("additional_config") or {}):
        return "vLLM's own"
    name = {
        "exact": "sam.vllm.exact_sampler.ExactSampler",
        "rejection": "sam.vllm.rejection_sampler.RejectionVerification",
    }[config.speculation.verification]
    module, _, attribute = name.rpartition(".")
    getattr(importlib.import_module(module), attribute)
    if config.trainer.device == "npu":
        return f"{name}, put there by {ASCEND_RUNNER}.load_model {_ascend_state()}"
    for problem in _plugin_problems():
        raise RuntimeError(problem)
    return f"{name}, put there by the plugin after {VLLM_RUNNER}.load_model"


def _plugin_problems() -> Iterator[str]:
    """Whether vLLM's processes would load this project's plugin, and the plugin reach their model runner."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if not any(one.name == "sam" for one in importlib.metadata.entry_points(group=PLUGINS)):
        yield "the plugin `sam` is not registered with vLLM: pip install --no-deps -e . where vLLM runs"
    elif allowed is not None and "sam" not in allowed.split(","):
        yield f"VLLM_PLUGINS={allowed} keeps vLLM from loading the plugin `sam`: add it, or unset the variable"
    elif os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0") != "0":
        yield (
            f"VLLM_USE_V2_MODEL_RUNNER={os.environ['VLLM_USE_V2_MODEL_RUNNER']}: the plugin does not replace that "
            "model runner's sampler: unset it"
        )
    else:
        from vllm.plugins import load_general_plugins
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        with contextlib.suppress(ImportError):
            load_general_plugins()
        if not getattr(GPUModelRunner.load_model, "_sam", False):
            yield f"the plugin `sam` was loaded and {VLLM_RUNNER}.load_model is as before: install vllm==0.23.0"
