"""What can be wrong on Ascend before a device is touched: CANN, patches, graph mode, lossy settings."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from recipe.launch import source_patches
from recipe.preflight.problem import Problem

REQUIRED = {"vllm-ascend": "0.23.0.post1", "torch-npu": "2.10.0.post4"}
CANN_MAJOR = "9"  # what torch-npu 2.10.0 and vllm-ascend 0.23.0 are released with
# Of rollout.engine_kwargs: what must not be on. sam.verify samples from the whole vocabulary.
SETTINGS = (
    ("ascend.scheduling", "vllm.async_scheduling"),
    ("ascend.lossy", "vllm.additional_config.rejection_sampler_config.enable_block_verify"),
    ("ascend.lossy", "vllm.additional_config.rejection_sampler_config.enable_entropy_verify"),
    ("ascend.lossy", "vllm.additional_config.enable_reduce_sample"),
)
# Replays of an emulated graph in 92 to 97 steps: tests/ascend/test_engine.py, docs/ascend.md.
DECODE_ONLY_WARNING = (
    "cudagraph_mode=FULL_DECODE_ONLY replays a graph only where every request has exactly 1+k tokens: 20 of 92 steps "
    "with drafts and 5 of 94 with the switch mostly off in the simulation, the others ran eager; FULL replayed 87 and "
    "90: set actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode=FULL"
)


def installation_problems(_: DictConfig) -> Iterator[Problem]:
    """CANN and the patches of this machine, whatever the config."""
    if (cann := cann_version()) is None:
        yield Problem("ascend.cann", "CANN is not found")
    elif cann.split(".")[0] != CANN_MAJOR:
        yield Problem("ascend.cann", f"CANN {cann}")
    for series in source_patches.load():
        if series.state != "absent" and (said := series.problem()):
            value, _, remedy = said.partition(": ")
            yield Problem("ascend.patches", value, remedy)


def find_warnings(config: DictConfig) -> Iterator[str]:
    mode = OmegaConf.select(config.actor_rollout_ref.rollout.engine_kwargs, "vllm.compilation_config.cudagraph_mode")
    if mode == "FULL_DECODE_ONLY" and config.speculation.method != "off":
        yield DECODE_ONLY_WARNING


def cann_version() -> str | None:
    """The toolkit's version, from the file it is installed with."""
    root = Path(os.environ.get("ASCEND_HOME_PATH", "/usr/local/Ascend/ascend-toolkit/latest"))
    for path in sorted(root.glob("*-linux/ascend_toolkit_install.info")):
        if found := re.search(r"^version=(.+)$", path.read_text(), flags=re.M):
            return found[1].strip()
    return None


def setting_problems(config: DictConfig) -> Iterator[Problem]:
    """Settings that cannot be or that change what is sampled; found without a device too."""
    for code, key in SETTINGS:
        value = OmegaConf.select(config.actor_rollout_ref.rollout.engine_kwargs, key)
        if str(value).lower() in ("true", "1") and (code != "ascend.scheduling" or config.speculation.method != "off"):
            yield Problem(code, f"actor_rollout_ref.rollout.engine_kwargs.{key}={value}")
