"""What can be wrong on Ascend before a device is touched: CANN, patches, graph mode."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from recipe.launch import source_patches
from recipe.preflight.problem import Problem

COMPILATION = "actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config"
VLLM_COMPILE = ("none", "3", "vllm_compile")  # vLLM's CompilationMode, the only one with which vllm-ascend captures


def patch_problems(_: DictConfig) -> Iterator[Problem]:
    """The patches of this machine, whatever the config."""
    for series in source_patches.load():
        if series.state != "absent" and (said := series.problem()):
            value, _, remedy = said.partition(": ")
            yield Problem("ascend.patches", value, remedy)


def find_warnings(config: DictConfig) -> Iterator[str]:
    """Drafts of unequal length where only steps of 1 + k tokens a request replay a graph."""
    if (method := config.speculation.method) in ("ngram", "suffix") and _graph_mode(config) == "FULL_DECODE_ONLY":
        yield (
            f"cudagraph_mode=FULL_DECODE_ONLY: with speculation.method={method} nearly every step runs eager: set "
            f"{COMPILATION}.cudagraph_mode=FULL"
        )


def graph_problems(config: DictConfig) -> Iterator[Problem]:
    """Graph modes that vllm-ascend cannot do, each with the one that works; found without a device too."""
    if (mode := _graph_mode(config)) in (None, "NONE"):
        return
    compilation, rollout = OmegaConf.select(config, f"{COMPILATION}.mode"), config.actor_rollout_ref.rollout
    if str(compilation).lower() not in VLLM_COMPILE:
        value = f"{COMPILATION}.mode={compilation} with cudagraph_mode={mode}"
        yield Problem("ascend.graph_mode", value, "vllm-ascend captures graphs of compiled models only: unset mode")
    if mode == "FULL_DECODE_ONLY" and rollout.data_parallel_size > 1 and config.speculation.method == "sam":
        value = f"{COMPILATION}.cudagraph_mode={mode} with rollout.data_parallel_size={rollout.data_parallel_size}"
        yield Problem("ascend.graph_mode", value, "steps without drafts would run eager: set cudagraph_mode=FULL")


def _graph_mode(config: DictConfig) -> str | None:
    """None: no graphs are asked for."""
    mode = OmegaConf.select(config, f"{COMPILATION}.cudagraph_mode")
    return None if mode is None or config.actor_rollout_ref.rollout.enforce_eager else str(mode)


def cann_version() -> str | None:
    """The toolkit's version, from the file it is installed with."""
    root = Path(os.environ.get("ASCEND_HOME_PATH", "/usr/local/Ascend/ascend-toolkit/latest"))
    for path in sorted(root.glob("*-linux/ascend_toolkit_install.info")):
        if found := re.search(r"^version=(.+)$", path.read_text(), flags=re.M):
            return found[1].strip()
    return None
