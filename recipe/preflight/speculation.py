"""Which drafter and which sampler would run: vLLM's own code loads them here as it would in an engine."""

import contextlib
import importlib.metadata
import os
from pathlib import Path
from types import SimpleNamespace

from omegaconf import DictConfig, OmegaConf

from recipe.launch import source_patches
from recipe.preflight.device_memory import longest_sequence
from recipe.preflight.files import trained_method
from recipe.preflight.problem import Problem, first_line
from sam.config import WITH_DRAFT_MODEL
from sam.trained_drafter import settings_of

PLUGINS = "vllm.general_plugins"
ASCEND_RUNNER = "vllm_ascend.worker.model_runner_v1.NPUModelRunner"
VLLM_RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"


def resolve(config: DictConfig) -> tuple[dict[str, str], list[Problem]]:
    """`drafter` and `sampler` in words, and what is wrong with them. Imports vLLM."""
    problems: list[Problem] = []
    found = {}
    for name, load in {"drafter": _drafter, "sampler": _sampler}.items():
        try:
            found[name] = load(config)
        except Exception as error:  # vLLM's, and whatever a drafter's import raises
            problems.append(Problem("drafter.load", f"the {name}: {first_line(error)}"))
            found[name] = "would not load"
    return found, problems


def _settings(config: DictConfig) -> dict:
    return OmegaConf.to_container(config.actor_rollout_ref.rollout.engine_kwargs.vllm)


def _drafter(config: DictConfig) -> str:
    """Read by vLLM's SpeculativeConfig and, where it is a class, made by the function that vLLM calls."""
    settings = _settings(config)
    if not (asked := settings.get("speculative_config")):
        return "none"
    if config.speculation.paths > 1:
        _check_paths(config, settings)
    if config.speculation.method in WITH_DRAFT_MODEL:
        return _draft_model(config)
    from vllm.config.speculative import SpeculativeConfig
    from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer

    speculative = SpeculativeConfig(**asked)
    if speculative.method == "ngram_gpu" and config.speculation.method == "sam":
        _check_ranks(config, settings)
        if config.trainer.device == "npu":
            made = "sam.vllm.ascend.async_proposer.AscendAsyncSamProposer"
            return f"{made}, in place of vllm-ascend's AscendNgramProposerNPU {_ascend_state()}"
        return "sam.vllm.async_proposer.AsyncSamProposer, in place of vLLM's NgramProposerGPU"
    if speculative.method != "custom_class":
        return f"{speculative.method}, vLLM's own"
    longest = config.actor_rollout_ref.rollout.max_model_len or longest_sequence(config)
    engine = SimpleNamespace(
        speculative_config=speculative,
        additional_config=settings.get("additional_config"),
        model_config=SimpleNamespace(max_model_len=longest, model=config.actor_rollout_ref.model.path),
        scheduler_config=SimpleNamespace(max_num_seqs=config.actor_rollout_ref.rollout.max_num_seqs),
    )
    made = create_custom_proposer(engine)
    by = create_custom_proposer.__module__
    if config.trainer.device == "npu":
        by += f", which vllm_ascend.spec_decode calls {_ascend_state()}"
    return f"{type(made).__module__}.{type(made).__qualname__}, made by {by}"


def _draft_model(config: DictConfig) -> str:
    """By the door itself: a draft model is loaded with an engine only.

    Raises:
        RuntimeError: vLLM's processes would not open it, or have no such method for this model.
    """
    from sam.vllm.trained import doors

    _check_plugin()
    method = trained_method(config)
    door = doors.DOORS[method]
    if method == "eagle3":
        _check_eagle3(Path(config.speculation.draft_model), Path(config.actor_rollout_ref.model.path).expanduser())
    asynchronous = not _settings(config)["speculative_config"].get("disable_padded_drafter_batch")
    made = doors.made(door, asynchronous)
    return f"{made.__module__}.{made.__qualname__}, in place of vLLM's {door.__name__}"


def _check_eagle3(head: Path, model: Path) -> None:
    """Raise RuntimeError unless vLLM has a class for the head, and the model gives its hidden states to one."""
    from vllm.model_executor.models.interfaces import supports_eagle3
    from vllm.model_executor.models.registry import ModelRegistry

    for name in settings_of(model).get("architectures") or []:
        known = ModelRegistry.models.get(name)
        if known is None or not supports_eagle3(known.load_model_cls()):
            raise RuntimeError(f"{model}: vLLM's {name} gives no hidden states to EAGLE3 (choose draft_model or sam)")
    for name in settings_of(head).get("architectures") or []:
        # As vLLM's EAGLEConfig names it.
        named = name if name.startswith("Eagle3") or name.endswith("Eagle3") else f"Eagle3{name}"
        if named not in ModelRegistry.models:
            raise RuntimeError(f"speculation.draft_model={head}: {name} is no EAGLE3 head that vLLM knows")


def _check_ranks(config: DictConfig, settings: dict) -> None:
    """Raise ValueError where an engine's ranks could not agree on drafts under asynchronous scheduling."""
    from sam.vllm import ranks

    ranks.check_async(
        SimpleNamespace(
            tensor_parallel_size=config.actor_rollout_ref.rollout.tensor_model_parallel_size,
            pipeline_parallel_size=settings.get("pipeline_parallel_size") or 1,
            prefill_context_parallel_size=settings.get("prefill_context_parallel_size") or 1,
            distributed_executor_backend=settings.get("distributed_executor_backend"),
        )
    )


def _check_paths(config: DictConfig, settings: dict) -> None:
    """Raise ValueError where rows of further paths do not go with an engine's other settings."""
    from sam.vllm.paths import rows

    rollout = config.actor_rollout_ref.rollout
    sizes = {name: settings.get(name) or 1 for name in rows.UNDIVIDED}
    rows.check_engine(
        SimpleNamespace(
            parallel_config=SimpleNamespace(
                tensor_parallel_size=rollout.tensor_model_parallel_size,
                distributed_executor_backend=settings.get("distributed_executor_backend"),
                enable_dbo=settings.get("enable_dbo"),
                **sizes,
            ),
            kv_transfer_config=settings.get("kv_transfer_config"),
            model_config=SimpleNamespace(enable_return_routed_experts=rollout.get("enable_rollout_routing_replay")),
        )
    )


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
    from sam.vllm.exact_sampler import ExactSampler
    from sam.vllm.rejection_sampler import RejectionVerification

    sampler = ExactSampler if config.speculation.verification == "exact" else RejectionVerification
    name = f"{sampler.__module__}.{sampler.__qualname__}"
    if config.trainer.device == "npu":
        return f"{name}, put there by the plugin after {ASCEND_RUNNER}.load_model {_ascend_state()}"
    _check_plugin()
    return f"{name}, put there by the plugin after {VLLM_RUNNER}.load_model"


def _check_plugin() -> None:
    """Raise RuntimeError unless vLLM's processes would load this project's plugin, and it reaches their runner."""
    allowed, runner = os.environ.get("VLLM_PLUGINS"), os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0")
    if not any(one.name == "sam" for one in importlib.metadata.entry_points(group=PLUGINS)):
        raise RuntimeError("the plugin `sam` is not registered with vLLM (pip install --no-deps -e . where vLLM runs)")
    if allowed is not None and "sam" not in allowed.split(","):
        raise RuntimeError(f"VLLM_PLUGINS={allowed} keeps vLLM from loading the plugin `sam` (add it or unset it)")
    if runner != "0":
        raise RuntimeError(f"VLLM_USE_V2_MODEL_RUNNER={runner}, whose sampler the plugin does not replace (unset it)")
    from vllm.plugins import load_general_plugins

    from sam.vllm import patches

    with contextlib.suppress(ImportError):
        load_general_plugins()
    if not patches.is_registered():
        raise RuntimeError("the plugin `sam` leaves vLLM's workers as they are (install vllm==0.23.0)")
