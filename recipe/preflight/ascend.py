"""What can be wrong on Ascend before a device is touched: CANN, patches, graph mode, lossy settings."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from recipe.launch import source_patches
from recipe.preflight.problem import Problem

# Of rollout.engine_kwargs: what must not be on. sam.verify samples from the whole vocabulary.
SETTINGS = (
    ("ascend.scheduling", "vllm.async_scheduling"),
    ("ascend.lossy", "vllm.additional_config.rejection_sampler_config.enable_block_verify"),
    ("ascend.lossy", "vllm.additional_config.rejection_sampler_config.enable_entropy_verify"),
    ("ascend.lossy", "vllm.additional_config.enable_reduce_sample"),
)
COMPILATION = "actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config"
VLLM_COMPILE = ("3", "vllm_compile")  # vLLM's CompilationMode, the only one with which vllm-ascend captures graphs


def patch_problems(_: DictConfig) -> Iterator[Problem]:
    """The patches of this machine, whatever the config."""
    for series in source_patches.load():
        if series.state != "absent" and (said := series.problem()):
            value, _, remedy = said.partition(": ")
            yield Problem("ascend.patches", value, remedy)


def find_warnings(config: DictConfig) -> Iterator[str]:
    """Drafts of unequal length where only steps of 1 + k tokens a request replay a graph."""
    rollout, method = config.actor_rollout_ref.rollout, config.speculation.method
    if rollout.enforce_eager or OmegaConf.select(config, f"{COMPILATION}.cudagraph_mode") != "FULL_DECODE_ONLY":
        return
    if method in ("ngram", "suffix"):
        yield (
            f"cudagraph_mode=FULL_DECODE_ONLY: with speculation.method={method} nearly every step runs eager: set "
            f"{COMPILATION}.cudagraph_mode=FULL"
        )
    elif method == "sam" and config.speculation.draft_shape == "ragged":
        yield (
            "cudagraph_mode=FULL_DECODE_ONLY with speculation.draft_shape=ragged: steps with drafts run eager: set "
            f"draft_shape to auto, or {COMPILATION}.cudagraph_mode=FULL"
        )


def graph_problems(config: DictConfig) -> Iterator[Problem]:
    """Graph modes that vllm-ascend cannot do, each with the one that works; found without a device too."""
    rollout = config.actor_rollout_ref.rollout
    mode = OmegaConf.select(config, f"{COMPILATION}.cudagraph_mode")
    if rollout.enforce_eager or mode is None or str(mode) == "NONE":
        return
    compilation = OmegaConf.select(config, f"{COMPILATION}.mode")
    if compilation is not None and str(compilation).lower() not in VLLM_COMPILE:
        value = f"{COMPILATION}.mode={compilation} with cudagraph_mode={mode}"
        yield Problem("ascend.graph_mode", value, "vllm-ascend captures graphs of compiled models only: unset mode")
    if mode == "FULL_DECODE_ONLY" and rollout.data_parallel_size > 1 and config.speculation.method == "sam":
        value = f"{COMPILATION}.cudagraph_mode={mode} with rollout.data_parallel_size={rollout.data_parallel_size}"
        yield Problem("ascend.graph_mode", value, "steps without drafts would run eager: set cudagraph_mode=FULL")


def cann_version() -> str | None:
    """The toolkit's version, from the file it is installed with."""
    root = Path(os.environ.get("ASCEND_HOME_PATH", "/usr/local/Ascend/ascend-toolkit/latest"))
    for path in sorted(root.glob("*-linux/ascend_toolkit_install.info")):
        if found := re.search(r"^version=(.+)$", path.read_text(), flags=re.M):
            return found[1].strip()
    return None


def _drafts_synchronously(config: DictConfig) -> bool:
    method = config.speculation.method
    return method in ("ngram", "suffix") or (method == "sam" and config.speculation.async_scheduling in ("off", False))


def setting_problems(config: DictConfig) -> Iterator[Problem]:
    """Settings that cannot be or that change what is sampled; found without a device too."""
    for code, key in SETTINGS:
        value = OmegaConf.select(config.actor_rollout_ref.rollout.engine_kwargs, key)
        if str(value).lower() in ("true", "1") and (code != "ascend.scheduling" or _drafts_synchronously(config)):
            yield Problem(code, f"actor_rollout_ref.rollout.engine_kwargs.{key}={value}")
