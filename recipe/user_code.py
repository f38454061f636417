"""What users bring of their own: verl's keys for it, where their files are, and the names that keys had before."""

import importlib.util
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

# A Python file (or pkg://module), and what is looked up in it.
CODE = {
    "reward.custom_reward_function.path": "reward.custom_reward_function.name",
    "reward.reward_manager.module.path": "reward.reward_manager.name",
    "trainer.v1.sampler.custom_sampler.path": "trainer.v1.sampler.custom_sampler.name",
    "data.custom_cls.path": "data.custom_cls.name",
}
AGENT = "actor_rollout_ref.rollout.agent"
AGENT_LOOPS = f"{AGENT}.agent_loop_config_path"
TURNS = "actor_rollout_ref.rollout.multi_turn"
TOOLS = f"{TURNS}.tool_config_path"
FILES = (*CODE, AGENT_LOOPS, TOOLS, f"{TURNS}.function_tool_path")
ROUTER = "actor_rollout_ref.rollout.router_config_path"  # recipe.launch.routing looks for it
FILE = "file://"
# Of verl's legacy_reward_impl.yaml, which its V1 trainer does not read; other keys are the same below `reward`.
LEGACY_SECTIONS = ("custom_reward_function", "reward_model", "sandbox_fusion")
LEGACY = {
    "reward_model.num_workers": "num_workers",
    "reward_model.reward_manager": "reward_manager.name",
    "reward_model.reward_loop_source": "reward_manager.source",
    "reward_model.reward_loop_module_path": "reward_manager.module.path",
    "reward_model.reward_loop_class_name": "reward_manager.name",
    "reward_model.model.path": "reward_model.model_path",
}
REWARD_ARGUMENTS = "custom_reward_function.reward_kwargs"


def connect(config: DictConfig, overrides: list[str]) -> None:
    """Give legacy keys their present names, and paths the folder that the run starts in: processes start elsewhere.

    Raises:
        ValueError: a legacy key has no successor, or both are given.
    """
    given = {override.lstrip("+").split("=", 1)[0] for override in overrides}
    for section in LEGACY_SECTIONS:
        for old, value in _leaves(config.get(section), section):
            new = f"reward.{LEGACY.get(old, old)}"
            parent, _, name = new.rpartition(".")
            if not old.startswith(REWARD_ARGUMENTS) and name not in (OmegaConf.select(config, parent) or {}).keys():
                raise ValueError(f"{old}={value}: verl 0.9.1 has no such key below reward: remove it")
            if new in given:
                raise ValueError(f"{old}={value}: {new} is given too, and means the same: remove one")
            OmegaConf.update(config, new, value)
            OmegaConf.update(config, old, None)
    for key in (*FILES, ROUTER):
        if (path := OmegaConf.select(config, key)) and isinstance(path, str) and not path.startswith("pkg://"):
            OmegaConf.update(config, key, located(path))


def _leaves(node: DictConfig | None, path: str):
    for name, value in (node or {}).items():
        key = f"{path}.{name}"
        if isinstance(value, DictConfig):
            yield from _leaves(value, key)
        elif value is not None:
            yield key, value


def located(path: str) -> str:
    """The absolute path of a file that is where verl looks: here, then beside and in verl's package."""
    wanted = Path(path.removeprefix(FILE)).expanduser()
    verl = Path(importlib.util.find_spec("verl").origin).parent
    found = (folder / wanted for folder in (Path.cwd(), verl.parent, verl))
    return str(next((one for one in found if one.is_file()), path))
