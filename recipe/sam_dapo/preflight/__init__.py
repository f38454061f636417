"""Preflight: what is looked at before devices are taken. A problem is a line: what was found and expected, what to do,
and a code in brackets. What imports verl and vLLM is asked later, in Ray: vllm_command.py."""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from recipe.sam_dapo.launch.config import ConfigError
from recipe.sam_dapo.preflight import compatibility, device_memory, machine, settings, vllm_command

# What is looked at, by name: of the config alone, of files, of this machine and its device.
CONFIG_CHECKS = {
    "values": compatibility.values,
    "sizes": settings.sizes,
    "memory of a device": device_memory.problems,
}
FILE_CHECKS = {
    "data": settings.data,
    "model": settings.model,
    "draft model": settings.draft_model,
    "corpus": settings.corpus,
    "history": settings.history_of_responses,
}
DEVICE_CHECKS = {
    "packages and variables": compatibility.packages_and_variables,
    "memory and disk": machine.memory_and_disk,
}
IMAGE_CHECKS = (compatibility.packages_and_variables, vllm_command.what_verl_and_vllm_say)


def check(config: DictConfig, files: bool = True) -> None:
    """Raise ConfigError with a line for each problem found."""
    lines = list(find_problems(config, files))
    if lines:
        raise ConfigError("\n".join(lines))


def find_problems(config: DictConfig, files: bool = True) -> Iterator[str]:
    """What can be said at once, before every run. Without `files` those that a run reads may still have to be made."""
    return (line for _name, lines in look(config, files) for line in lines)


def look(config: DictConfig, files: bool = True) -> Iterator[tuple[str, list[str]]]:
    """What is looked at and the problems found there: a missing device first, then keys, with which the rest
    calculates."""
    missing = list(machine.missing_device(config))
    yield "device", missing
    wrong = list(settings.keys(config))
    yield "keys", wrong
    if wrong:
        return
    finds = dict(CONFIG_CHECKS)
    if files:
        finds |= FILE_CHECKS
    if not missing:
        finds |= DEVICE_CHECKS
    for name, find in finds.items():
        yield name, list(find(config))


def counted(problems: list[str]) -> str:
    """How many there are."""
    return "1 problem" if len(problems) == 1 else f"{len(problems)} problems"


def node_problems(content: dict, head: dict) -> list[str]:
    """Runs on a node of a cluster, in the environment that `ray start` gave its Ray."""
    config = OmegaConf.create(content)
    lines = [line for find in (DEVICE_CHECKS | FILE_CHECKS).values() for line in find(config)]
    return [*lines, *machine.differences(head)]
