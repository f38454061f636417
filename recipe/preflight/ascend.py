"""What can be wrong on Ascend before a device is touched: pairing of versions, patches, graph mode, lossy settings."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig

from recipe.launch import source_patches, versions
from recipe.preflight.problem import Problem

REQUIRED = {"vllm-ascend": "0.23.0.post1", "torch-npu": "2.10.0.post4"}
CANN_MAJOR = "9"  # what torch-npu 2.10.0 and vllm-ascend 0.23.0 are released with
# Replays of an emulated graph in 92 to 97 steps: tests/ascend/test_engine.py, docs/ascend.md.
DECODE_ONLY_WARNING = (
    "cudagraph_mode=FULL_DECODE_ONLY replays a graph only where every request has exactly 1+k tokens: 20 of 92 steps "
    "with drafts and 5 of 94 with the switch mostly off in the simulation, the others ran eager; FULL replayed 87 and "
    "90: set actor_rollout_ref.rollout.engine_kwargs.vllm.compilation_config.cudagraph_mode=FULL"
)


def find_problems(config: DictConfig) -> Iterator[Problem]:
    yield from installation_problems()
    yield from setting_problems(config)


def installation_problems() -> Iterator[Problem]:
    """What is wrong with this machine's packages, whatever the config."""
    yield from _pairing()
    for series in source_patches.load():
        if series.state != "absent" and (problem := series.problem()):
            yield Problem("ascend.patches", problem)


def find_warnings(config: DictConfig) -> Iterator[str]:
    mode = (_vllm(config).get("compilation_config") or {}).get("cudagraph_mode")
    if mode == "FULL_DECODE_ONLY" and config.speculation.method != "off":
        yield DECODE_ONLY_WARNING


def _vllm(config: DictConfig) -> dict:
    return config.actor_rollout_ref.rollout.engine_kwargs.get("vllm") or {}


def _pairing() -> Iterator[Problem]:
    for package, wanted in REQUIRED.items():
        found = versions.installed(package)
        if found != wanted:
            yield Problem(
                "ascend.versions",
                f"{package} {found or 'is not installed'}: torch 2.10.0, torch-npu {REQUIRED['torch-npu']} and "
                f"vllm-ascend {REQUIRED['vllm-ascend']} belong together: install the pins of requirements/ascend.txt",
            )
    cann = cann_version()
    if cann is None:
        yield Problem(
            "ascend.cann",
            "CANN is not found: run source /usr/local/Ascend/ascend-toolkit/set_env.sh, or set ASCEND_HOME_PATH",
        )
    elif cann.split(".")[0] != CANN_MAJOR:
        yield Problem(
            "ascend.cann",
            f"CANN {cann}: torch-npu {REQUIRED['torch-npu']} is released with CANN {CANN_MAJOR}: install that",
        )


def cann_version(home: str | None = None) -> str | None:
    """The toolkit's version, from the file it is installed with."""
    root = Path(home or os.environ.get("ASCEND_HOME_PATH", "/usr/local/Ascend/ascend-toolkit/latest"))
    for path in sorted(root.glob("*-linux/ascend_toolkit_install.info")):
        if found := re.search(r"^version=(.+)$", path.read_text(), flags=re.M):
            return found[1].strip()
    return None


def setting_problems(config: DictConfig) -> Iterator[Problem]:
    """Settings that cannot be or that change what is sampled; found without a device too."""
    place = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    settings = _vllm(config)
    additional = settings.get("additional_config") or {}
    if _is_on(settings.get("async_scheduling")) and config.speculation.method != "off":
        yield Problem(
            "ascend.scheduling",
            f"{place}.async_scheduling={settings['async_scheduling']}: drafters on the host need the step's tokens "
            "first, vLLM refuses the pair: unset it",
        )
    rejection_sampler = additional.get("rejection_sampler_config") or {}
    for switch in ("enable_block_verify", "enable_entropy_verify"):
        if _is_on(rejection_sampler.get(switch)):
            yield Problem(
                "ascend.lossy",
                f"{place}.additional_config.rejection_sampler_config.{switch}={rejection_sampler[switch]} changes what "
                "is sampled: unset it",
            )
    if _is_on(additional.get("enable_reduce_sample")):
        yield Problem(
            "ascend.lossy",
            f"{place}.additional_config.enable_reduce_sample={additional['enable_reduce_sample']}: sam.verify samples "
            "from the whole vocabulary: unset it",
        )


def _is_on(value) -> bool:
    return str(value).lower() in ("true", "1")
