"""What this machine must have, and which values of a config this recipe does not run with: docs/compatibility.md."""

import importlib.metadata
import os
import platform
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from recipe.sam_dapo.launch import versions
from recipe.sam_dapo.patch import Patches
from sam.vllm import doors

PINS = "install the pins of requirements/"
BUILD = "use the script in scripts/, which has an environment for each device"
# Devices, what is looked up, and the values that are taken; of a variable none, too.
MACHINE = (
    ("cpu cuda npu", "Python", "3.11.* 3.12.*", PINS),
    ("cpu cuda npu", "verl", "0.9.1", PINS),
    ("cpu cuda", "vllm", "0.2[3-9].* 0.[3-9][0-9].*", PINS),
    ("npu", "vllm", "0.23.0", PINS),
    ("cpu cuda", "torch", "2.11.0", PINS),
    ("npu", "torch", "2.10.0", PINS),
    ("npu", "torch-npu", "2.10.0.post4", PINS),
    ("npu", "vllm-ascend", "0.23.0.post1", PINS),
    ("npu", "CANN", "9.*", "install it, source its set_env.sh or set ASCEND_HOME_PATH"),
    ("cpu", "vLLM's build", "cpu", BUILD),
    ("cuda", "vLLM's build", "gpu", BUILD),
    ("cpu cuda", "plugin sam", "installed", "pip install --no-deps -e . where vLLM runs"),
    ("cpu cuda", "VLLM_PLUGINS", "sam sam,* *,sam *,sam,*", "add sam to it, or unset it"),
    ("cpu cuda", "VLLM_USE_V2_MODEL_RUNNER", "0 1", "unset it: vLLM chooses its model runner"),
    ("npu", "HCCL_HOST_SOCKET_PORT_RANGE", "auto [0-9]*", "unset it, verl lets the system choose"),
    ("cpu cuda npu", "VLLM_PORT", "[0-9]*", "unset it, which Kubernetes sets for a service called vllm"),
)
# Groups of vLLM's doors (sam/vllm/doors.py) that a run needs with a device.
NEEDED = {"cpu": ("plugin", "first", "cpu"), "cuda": ("plugin", "first"), "npu": ("plugin", "first")}
VLLM = "rollout.engine_kwargs.vllm"
FLASH = "model.override_config.attn_implementation"
NOT_READ = "verl does not read it"
PLACED = "verl places its workers by"
OLD_KV = "KV of old weights could be read"
# Values that neither verl nor vLLM refuses before a run, or that verl passes over: key, what is taken, why the rest is
# not. actor., model. and rollout. stand in actor_rollout_ref.
VALUES = (
    ("trainer.use_v1", "true", "the recipe's trainer is one of verl's V1"),
    ("trainer.v1.trainer_mode", "sync", "asynchronous trainers run in verl's own scripts"),
    ("actor.strategy", "fsdp fsdp2 megatron", "no such training engine"),
    ("rollout.name", "vllm", "the recipe replaces vLLM's drafter and sampler only"),
    ("rollout.do_sample", "true", f"{NOT_READ}, temperature decides"),
    ("rollout.val_kwargs.do_sample", "true", f"{NOT_READ}, val_kwargs.temperature=0 is greedy"),
    ("data.reward_fn_key", "data_source", NOT_READ),
    ("skip.rollout_tq.enable", "false", "the recipe's sampler waits for responses that are generated"),
    ("algorithm.filter_groups.max_inflight_gen_batches", "1", "rounds of dynamic sampling follow each other"),
    (f"{VLLM}.tensor_parallel_size", "null", f"{PLACED} rollout.tensor_model_parallel_size"),
    (f"{VLLM}.data_parallel_size", "null", f"{PLACED} rollout.data_parallel_size"),
    (f"{VLLM}.kv_transfer_config", "null", OLD_KV),
    (f"{VLLM}.kv_offloading_size", "null", OLD_KV),
)


def value_of(config: DictConfig, key: str) -> tuple[str, str]:
    """The full key, and its value in YAML's words."""
    key = f"actor_rollout_ref.{key}" if key.split(".")[0] in ("actor", "model", "rollout") else key
    value = OmegaConf.select(config, key)
    if value is None:
        return key, "null"
    return key, str(value).lower() if isinstance(value, bool) else str(value)


def installed_parts(device: str) -> Iterator[tuple[str, str, str | None]]:
    """Each of MACHINE that counts with a device, what this machine has of it, and what is wrong, in a line."""
    for devices, name, patterns, remedy in MACHINE:
        if device not in devices.split():
            continue
        expected = patterns.split()
        if name.startswith(("VLLM_", "HCCL_")):
            value = os.environ.get(name)
            is_right = value is None or _matches(value, expected)
            absent = "not set"
            code = "variable.refused"
        else:
            value = installed(name)
            is_right = value is not None and _matches(value, expected)
            absent = "not installed"
            code = "package.version"
        wrong = f"{name}={value}: expected {' or '.join(expected)}: {remedy} [{code}]"
        yield name, value or absent, None if is_right else wrong
    yield from vllm_doors(device)


def _matches(value: str, patterns: list[str]) -> bool:
    return any(fnmatchcase(value, pattern) for pattern in patterns)


def vllm_doors(device: str) -> Iterator[tuple[str, str, str | None]]:
    """What the installed vLLM has of its doors, and which of those that a run needs it lacks, in a line."""
    if not doors.is_installed():
        return
    for group, described in doors.describe().items():
        problem = doors.problem(group) if group in NEEDED[device] else None
        yield f"vLLM's doors, {group}", described, problem and f"{problem} [vllm.door]"


def installed(name: str) -> str | None:
    """The version of a package or of what is none."""
    if name == "Python":
        return platform.python_version()
    if name == "vLLM's build":  # the device that it is built for
        return {True: "cpu", False: "gpu"}.get(versions.engine_of_cpu())
    if name == "plugin sam":
        plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
        return "installed" if "sam" in plugins.names else None
    return cann_version() if name == "CANN" else versions.installed(name)


def cann_version() -> str | None:
    """The toolkit's version, from the file it is installed with."""
    root = Path(os.environ.get("ASCEND_HOME_PATH", "/usr/local/Ascend/ascend-toolkit/latest"))
    for path in root.glob("*-linux/ascend_toolkit_install.info"):
        version = re.search("^version=(.+)$", path.read_text(), re.M)
        if version:
            return version[1].strip()
    return None


def packages_and_variables(config: DictConfig) -> Iterator[str]:
    """What this machine lacks, or has otherwise than the recipe runs with."""
    yield from (wrong for *_, wrong in installed_parts(config.trainer.device) if wrong)
    if config.trainer.device != "npu":
        return
    patches = Patches()
    problem = patches.problem()
    if problem and patches.state != "not installed":
        yield f"{problem} [ascend.patches]"


def values(config: DictConfig) -> Iterator[str]:
    """Values of the config that the recipe does not run with."""
    rows = list(VALUES)
    if value_of(config, "actor.fsdp_config.ulysses_sequence_parallel_size")[1] not in ("1", "null"):
        rows += [(FLASH, "null flash_attention_2", "it does not see split sequences")]
    if config.trainer.device == "npu":
        rows += [("speculation.method", "ngram off sam suffix", "vllm-ascend's own draft models have no switch")]
    if config.trainer.val_only:
        rows += [("trainer.val_before_train", "true", "verl would train, in spite of val_only")]
    for key, taken, why in rows:
        key, value = value_of(config, key)
        if value not in taken.split():
            yield f"{key}={value}: {why}: set it to {' or '.join(taken.split())} [config.refused]"


def warnings(config: DictConfig) -> Iterator[str]:
    """What users bring in place of that with which a run repeats."""
    for key, recipes in (
        ("trainer.v1.sampler.custom_sampler.path", "pkg://recipe.sam_dapo.trainer.dynamic_sampling"),
        ("rollout.agent.agent_loop_manager_class", "recipe.sam_dapo.rollout.agent_loop.SeededManager"),
    ):
        key, value = value_of(config, key)
        if value != recipes:
            yield f"{key}={value}: seeds and the order of groups are not the recipe's: runs need not repeat"
