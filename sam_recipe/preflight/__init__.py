"""Preflight: what is looked at before devices are taken. A problem is a line: what was found and expected, what to do,
and a code in brackets."""

from collections.abc import Iterator

from omegaconf import DictConfig, OmegaConf

from sam_recipe.launch.config import ConfigError
from sam_recipe.patch import Patches
from sam_recipe.preflight import compatibility, machine, settings, vllm_command


def ascend_patches(config: DictConfig) -> Iterator[str]:
    patches = Patches()
    if config.trainer.device == "npu" and patches.state != "absent" and (said := patches.problem()):
        yield f"{said} [ascend.patches]"


# Of this machine and its device; of the config alone; of files; all without importing what takes long.
OF_DEVICE = (compatibility.packages_and_variables, ascend_patches, machine.memory_and_disk)
OF_IMAGE = (compatibility.packages_and_variables, ascend_patches, vllm_command.what_verl_and_vllm_say)
OF_CONFIG = (compatibility.values, settings.sizes, machine.memory_of_a_device)
OF_FILES = (settings.data, settings.model, settings.draft_model, settings.history_of_responses)


def check(config: DictConfig, without_files: bool = False) -> None:
    """Raise ConfigError with the first problem found, and how many more there are.

    verl and vLLM are asked last: an answer that is not known yet takes 20 s. They are not asked of a drafter that is
    not there yet. `without_files`: those that a run reads are still to be made.
    """
    lines = list(find_problems(config, without_files))
    if not lines and not settings.lacks_drafter(config):
        lines = vllm_command.taken_by_verl_and_vllm(config)
    if lines:
        raise ConfigError(lines[0] + f" ({len(lines) - 1} more)" * (len(lines) > 1))


def find_problems(config: DictConfig, without_files: bool = False) -> Iterator[str]:
    """What can be said at once, before every run; of keys and their types first, with which the rest calculates."""
    wrong, finds = list(settings.keys(config)), (*OF_CONFIG, *(() if without_files else OF_FILES), *OF_DEVICE)
    yield from wrong or (line for find in finds for line in find(config))


def of_this_node(content: dict, head: dict) -> list[str]:
    """Runs on a node of a cluster, in the environment that `ray start` gave its Ray."""
    config = OmegaConf.create(content)
    found = [line for find in (*OF_DEVICE, *OF_FILES) for line in find(config)]
    return [*found, *machine.differences(head)]
