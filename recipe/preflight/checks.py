"""The table of all checks, and who asks which of them."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from recipe.launch import environment, supervisor, versions
from recipe.launch.config import ConfigError
from recipe.preflight import (
    cluster,
    compatibility,
    device_memory,
    draft_model,
    files,
    machine,
    sizes,
    user_code,
    vllm_command,
)
from recipe.preflight.problem import Problem

VERL_AND_VLLM = "what verl and vLLM say"  # the check of that name


@dataclass(frozen=True)
class Check:
    """A subject to look at: its name in reports, the function that finds problems of a config, and where it is asked.

    start: before every run, imports nothing that takes long. node: on every node of a cluster. image: when an image is
    built. device: not on a machine without the config's device. npu: not for other devices.
    """

    name: str
    find: Callable[..., Iterable[Problem]]
    scopes: tuple[str, ...]


def check(config: DictConfig, to_be_built: Path | None = None) -> None:
    """Raise ConfigError with the first problem found, and how many more there are.

    verl and vLLM are asked last: an answer that is not known yet takes 20 s. They are not asked of a drafter that is
    not there yet. `to_be_built` as in find_problems.
    """
    problems = list(find_problems(config, to_be_built))
    if not problems and not draft_model.is_missing(config):
        problems = list(vllm_command.find_problems(config))
    _refuse(problems)


def check_keys(config: DictConfig) -> None:
    """Raise ConfigError if keys or their types are wrong: all that looks at a config calculates with them."""
    _refuse(list(sizes.key_problems(config)))


def _refuse(problems: list[Problem]) -> None:
    if problems:
        more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(problems[0] + more)


def find_problems(config: DictConfig, to_be_built: Path | None = None) -> Iterator[Problem]:
    """What can be said at once, before every run; of keys and their types first, with which the rest calculates.

    Nothing is said of what lies below the directory `to_be_built`, nor of the run's directory then: several runs may be
    checked at once, each with a directory of its own.
    """
    if wrong := list(sizes.key_problems(config)):
        yield from wrong
        return
    below = [f"{folder}/" for folder in (to_be_built, to_be_built.absolute())] if to_be_built else []
    for problem in (problem for one in select(config, "start") for problem in one.find(config)):
        if not any(path in problem.value for path in below) and not (below and problem.code == "run_dir.in_use"):
            yield problem


def select(config: DictConfig, scope: str | None = None) -> list[Check]:
    """The checks of a scope that concern the config's device; None: all."""
    is_npu = config.trainer.device == "npu"
    return [one for one in CHECKS if (scope is None or scope in one.scopes) and (is_npu or "npu" not in one.scopes)]


def node_problems(content: dict) -> list[Problem]:
    """Runs on a node of a cluster, in the environment that `ray start` gave its Ray."""
    os.environ.setdefault("RAY_ADDRESS", "auto")  # Ray runs here: its ports and memory are taken by itself
    config = OmegaConf.create(content)
    return [problem for one in select(config, "node") for problem in one.find(config)]


def find_warnings(config: DictConfig) -> Iterator[str]:
    """What costs time or a promise but breaks nothing, and what nobody has tried."""
    yield from compatibility.find_warnings(config)
    for variable, key in (("MODEL_PATH", "actor_rollout_ref.model.path"), ("DATA_DIR", "data.train_files")):
        if (value := os.environ.get(variable)) and value not in (used := str(OmegaConf.select(config, key))):
            yield f"{variable}={value} has no effect on {config.config_name}, which reads {used}: set {key} instead"
    yield from user_code.find_warnings(config)
    # On a laptop nobody waits for the curves.
    if config.trainer.device != "cpu" and "wandb" in config.trainer.logger and not environment.has_wandb_key():
        yield (
            f"no key of wandb's here: the run is kept in {config.run_dir}/wandb, for wandb sync later; to watch it, "
            "run wandb login on every node, or set WANDB_API_KEY where Ray is started"
        )


def _run_directory(config: DictConfig) -> Iterator[Problem]:
    if said := supervisor.lock_problem(Path(config.run_dir)):
        value, _, remedy = said.rpartition(": ")
        yield Problem("run_dir.in_use", value, remedy)


def _patches(_: DictConfig) -> Iterator[Problem]:
    if (patches := versions.Patches()).state != "absent" and (said := patches.problem()):
        value, _, remedy = said.partition(": ")
        yield Problem("ascend.patches", value, remedy)


# Every check; the order is the report's.
CHECKS = (
    Check("start", cluster.start_problems, ("start", "device")),
    Check("run directory", _run_directory, ("start",)),
    Check("packages and variables", compatibility.machine_problems, ("start", "device", "node", "image")),
    Check("Ascend: patches", _patches, ("start", "device", "node", "image", "npu")),
    Check("compatibility", compatibility.config_problems, ("start",)),
    Check("keys", sizes.key_problems, ()),
    Check("data", files.data_problems, ("start", "node")),
    Check("agent loops and rewards of the data", user_code.data_problems, ("start",)),
    Check("users' code", user_code.find_problems, ("node",)),
    Check("model", files.model_problems, ("start", "node")),
    Check("draft model", draft_model.find_problems, ("start", "node")),
    Check("history of responses", files.history_problems, ("start", "node")),
    Check("tokenizer", files.tokenizer_problems, ()),
    Check("batches", sizes.batch_problems, ("start",)),
    Check("lengths and token budgets", sizes.length_problems, ("start",)),
    Check("metric of dynamic sampling", sizes.metric_problems, ("start",)),
    Check("parallel sizes", sizes.parallel_problems, ("start",)),
    Check("memory of a device", device_memory.find_problems, ("start",)),
    Check("memory, disk and ports of this machine", machine.find_problems, ("start", "device", "node")),
    Check(VERL_AND_VLLM, vllm_command.find_problems_here, ("image",)),
    Check("Ray cluster", lambda config: cluster.find_problems(config, node_problems), ()),
)
