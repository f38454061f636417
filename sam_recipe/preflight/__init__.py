"""Preflight: what is looked at before devices are taken. A problem is a line: what was found and expected, what to do,
and a code in brackets."""

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from sam_recipe.launch import environment
from sam_recipe.launch.config import ConfigError
from sam_recipe.patch import Patches
from sam_recipe.preflight import compatibility, machine, settings, vllm_command

Check = Callable[[DictConfig], Iterable[str]]


def ascend_patches(config: DictConfig) -> Iterator[str]:
    if config.trainer.device != "npu":
        return
    if (patches := Patches()).state != "absent" and (said := patches.problem()):
        yield f"{said} [ascend.patches]"


def ray_cluster(config: DictConfig) -> Iterator[str]:
    return machine.ray_cluster(config, of_this_node)


def of_this_node(content: dict, head: dict) -> list[str]:
    """Runs on a node of a cluster, in the environment that `ray start` gave its Ray."""
    os.environ.setdefault("RAY_ADDRESS", "auto")  # Ray runs here: its ports and memory are taken by itself
    found = [line for find in select("node").values() for line in find(OmegaConf.create(content))]
    return [*found, *machine.differences(head)]


# Every check in the report's order, and where it is asked. start: before every run, imports nothing that takes long.
# node: on every node of a cluster. image: when an image is built. device: not on a machine without the config's device.
CHECKS: dict[Check, str] = {
    machine.start: "start device",
    compatibility.packages_and_variables: "start device node image",
    ascend_patches: "start device node image",
    compatibility.compatibility: "start",
    settings.keys: "",
    settings.data: "start node",
    settings.agent_loops_and_rewards_of_the_data: "start",
    vllm_command.users_code: "node",
    settings.model: "start node",
    settings.draft_model: "start node",
    settings.history_of_responses: "start node",
    settings.tokenizer: "",
    settings.batches: "start",
    settings.lengths: "start",
    settings.parallel_sizes: "start",
    machine.memory_of_a_device: "start",
    machine.memory_and_disk: "start device node",
    vllm_command.what_verl_and_vllm_say: "image",
    ray_cluster: "",
}


def select(scope: str = "") -> dict[str, Check]:
    """The checks of a scope by what they look at; all without one."""
    return {find.__name__.replace("_", " "): find for find, scopes in CHECKS.items() if scope in scopes}


def check(config: DictConfig, to_be_built: Path | None = None) -> None:
    """Raise ConfigError with the first problem found, and how many more there are.

    verl and vLLM are asked last: an answer that is not known yet takes 20 s. They are not asked of a drafter that is
    not there yet. `to_be_built` as in find_problems.
    """
    lines = list(find_problems(config, to_be_built))
    if not lines and not settings.lacks_drafter(config):
        lines = list(vllm_command.taken_by_verl_and_vllm(config))
    refuse(lines)


def refuse(lines: list[str]) -> None:
    if lines:
        raise ConfigError(lines[0] + f" ({len(lines) - 1} more)" * (len(lines) > 1))


def find_problems(config: DictConfig, to_be_built: Path | None = None) -> Iterator[str]:
    """What can be said at once, before every run; of keys and their types first, with which the rest calculates.

    Nothing is said of what lies below the directory `to_be_built`.
    """
    if wrong := list(settings.keys(config)):
        yield from wrong
        return
    passed_over = [f"{path}/" for path in (to_be_built, to_be_built.absolute())] if to_be_built else []
    for line in (line for find in select("start").values() for line in find(config)):
        if not any(part in line for part in passed_over):
            yield line


def find_warnings(config: DictConfig) -> Iterator[str]:
    """What costs time or a promise but breaks nothing, and what nobody has tried."""
    yield from compatibility.warnings(config)
    for variable, key in (("MODEL_PATH", "actor_rollout_ref.model.path"), ("DATA_DIR", "data.train_files")):
        if (value := os.environ.get(variable)) and value not in (used := str(OmegaConf.select(config, key))):
            yield f"{variable}={value} has no effect on {config.config_name}, which reads {used}: set {key} instead"
    # On a laptop nobody waits for the curves.
    if config.trainer.device != "cpu" and "wandb" in config.trainer.logger and not environment.has_wandb_key():
        yield (
            f"no key of wandb's here: the run is kept in {config.run_dir}/wandb, for wandb sync later; to watch it, "
            "run wandb login on every node, or set WANDB_API_KEY where Ray is started"
        )
