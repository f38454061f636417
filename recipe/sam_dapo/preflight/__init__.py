"""Preflight: what is looked at before devices are taken. A problem is a line: what was found and expected, what to do,
and a code in brackets. What imports verl and vLLM is asked later, in Ray: vllm_command.py."""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from recipe.sam_dapo.launch.config import ConfigError
from recipe.sam_dapo.preflight import compatibility, machine, settings, vllm_command

# Of this machine and its device; of the config alone; of files.
OF_DEVICE = (compatibility.packages_and_variables, machine.memory_and_disk)
OF_CONFIG = (compatibility.values, settings.sizes, machine.memory_of_a_device)
OF_FILES = (settings.data, settings.model, settings.draft_model, settings.corpus, settings.history_of_responses)
OF_IMAGE = (compatibility.packages_and_variables, vllm_command.what_verl_and_vllm_say)


def check(config: DictConfig, files: bool = True) -> None:
    """Raise ConfigError with the first problem found, and how many more there are."""
    if lines := list(find_problems(config, files)):
        raise ConfigError(lines[0] + f" ({len(lines) - 1} more)" * (len(lines) > 1))


def find_problems(config: DictConfig, files: bool = True, device: bool = True) -> Iterator[str]:
    """What can be said at once, before every run; of keys and their types first, with which the rest calculates.

    Without `files` those that a run reads may still have to be made; without `device` there is none here.
    """
    wrong, finds = list(settings.keys(config)), (*OF_CONFIG, *OF_FILES * files, *OF_DEVICE * device)
    yield from wrong or (line for find in finds for line in find(config))


def of_this_node(content: dict, head: dict) -> list[str]:
    """Runs on a node of a cluster, in the environment that `ray start` gave its Ray."""
    config = OmegaConf.create(content)
    found = [line for find in (*OF_DEVICE, *OF_FILES) for line in find(config)]
    return [*found, *machine.differences(head)]
