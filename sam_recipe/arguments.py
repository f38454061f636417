"""`python -m sam_recipe.arguments ARGUMENTS`: a run's arguments, looked at before anything is installed.

With Python's standard library alone, so that the run scripts answer `--help` and a typing mistake at once. What needs a
composed config is below: the values that everything calculates with, and what users bring.
"""

import argparse
import difflib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sam.command import Parser
from sam.config import CHOICES

CONFIGS = Path(__file__).resolve().with_name("configs")
NAMES_FILE = CONFIGS / "names.txt"  # of all keys, verl's too; `python -m tests.recipe.test_arguments` writes it
# Sections whose keys other programs define: what Hydra's `+` may add to.
FREE_SECTIONS = (
    *("actor_rollout_ref.rollout.engine_kwargs", "actor_rollout_ref.model.override_config"),
    *(f"actor_rollout_ref.actor.{name}" for name in ("megatron", "optim", "fsdp_config")),
    *("data.apply_chat_template_kwargs", "ray_kwargs.ray_init", "reward.reward_kwargs"),
    *("reward.custom_reward_function.reward_kwargs", "custom_reward_function.reward_kwargs"),
    *("trainer.v1.sampler.sampler_kwargs", "speculation"),
)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of a run; ends the process after --help and wrong ones."""
    parser = Parser(
        prog="sam run",
        description="One DAPO run.",
        epilog="The screen shows a line for each step and, at the end, how the run ended. All output of verl, vLLM and "
        "Ray is appended to train.log in run_dir.",
        allow_abbrev=False,
    )
    add_config_options(parser, required=True)
    parser.add_argument("--check", action="store_true", help="check config and machine only, before assets are built")
    parser.add_argument(
        "--accept-changes", action="store_true", help="go on although changed settings make another curve"
    )
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, for example speculation=off")
    return with_folder(parser.parse_intermixed_args(arguments))  # options among overrides too


def add_config_options(parser: argparse.ArgumentParser, required: bool) -> None:
    parser.add_argument("--config-name", required=required, help="a file of configs/ without .yaml")
    parser.add_argument("--config-dir", metavar="DIR", help="the folder that your own config of that name lies in")


def with_folder(options: argparse.Namespace) -> argparse.Namespace:
    """Options whose `config_name` has the folder of --config-dir in front; this project's own has none."""
    if options.config_dir is not None and options.config_name is not None:
        options.config_name = str(Path(options.config_dir).expanduser().absolute() / options.config_name)
    return options


def folder_of(config_name: str) -> Path:
    """The folder of a config: what stands in front of its name, configs/ without that."""
    return Path(config_name).absolute().parent if "/" in config_name else CONFIGS


def misspelt(overrides: list[str], config_name: str = "") -> str | None:
    """What is wrong with the first override that has a form, a choice or a name that there is not."""
    names = set(NAMES_FILE.read_text().split())
    folders = {CONFIGS, folder_of(config_name)}
    return next((said for one in overrides if (said := _mistake(one, names, folders))), None)


def _mistake(override: str, names: set[str], folders: set[Path]) -> str | None:
    key, equals, value = override.partition("=")
    if not equals and not override.startswith("~"):
        return f"{override}: expected KEY=VALUE, such as speculation=off"
    key, value = key.lstrip("+~").partition("@")[0], value.strip("'\"")
    section, _, name = key.partition(".")
    choices: set[str] = set()
    if (CONFIGS / key).is_dir() and key != "shared":
        choices = {path.stem for folder in folders for path in (folder / key).glob("*.yaml")} - {"knobs"}
    elif section == "speculation" and name in CHOICES and value.isalpha() and value not in ("true", "false"):
        choices = set(CHOICES[name])
    if choices and value and value not in choices and "$" not in value:
        return f"{key}={value} is unknown: expected one of {', '.join(sorted(choices))}"
    if section == "hydra" or (section != "speculation" and key.startswith(FREE_SECTIONS)):
        return None
    for number, part in enumerate(parts := key.split(".")):
        if part not in names:
            close = difflib.get_close_matches(part, names, 1)
            meant = ".".join([*parts[:number], *close, *parts[number + 1 :]])
            return f"{key} does not exist: " + (f"did you mean {meant}?" if close else "check its spelling")
    return None


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """What to do about a name that nothing knows; None: none of the known ones is like it."""
    close = difflib.get_close_matches(str(name), list(map(str, known)), 1)
    return f"did you mean {close[0]}?" if close else None


def _integer(least: int, most: float = math.inf, *others: int | None) -> Callable[[Any], bool]:
    return lambda value: value in others or (type(value) is int and least <= value <= most)


def _number(above: float, most: float = math.inf, *others: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and (above < value <= most or value in others) and value < math.inf


# What is expected, whether a value is that, and the keys, which hold whatever the rest of a config says; actor.,
# rollout. and model. stand in actor_rollout_ref. A key that the training engine has not is passed over.
RANGES = (
    ("keys below it", lambda value: isinstance(value, Mapping), """
     actor_rollout_ref actor model model.override_config rollout rollout.engine_kwargs rollout.engine_kwargs.vllm
     custom_reward_function data machine reward reward.reward_kwargs reward.reward_kwargs.overlong_buffer_cfg
     reward_model sandbox_fusion trainer watchdog"""),
    ("text", lambda value: isinstance(value, str) and bool(value.strip()),
     "assets data.prompt_key model.path run_dir trainer.default_local_dir"),
    ("text, or null", lambda value: value is None or isinstance(value, str), "model.custom_chat_template"),
    ("true or false", lambda value: isinstance(value, bool), """algorithm.filter_groups.enable
     reward.reward_kwargs.overlong_buffer_cfg.enable reward.reward_kwargs.overlong_buffer_cfg.log"""),
    ("an integer of at least 1", _integer(1), """
     actor.fsdp_config.ulysses_sequence_parallel_size actor.megatron.context_parallel_size
     actor.megatron.expert_model_parallel_size actor.megatron.pipeline_model_parallel_size
     actor.megatron.tensor_model_parallel_size actor.ppo_epochs actor.ppo_max_token_len_per_gpu
     actor.ppo_mini_batch_size data.gen_batch_size data.max_prompt_length data.max_response_length data.train_batch_size
     reward.num_workers rollout.agent.num_workers rollout.checkpoint_engine.update_weights_bucket_megabytes
     rollout.data_parallel_size rollout.max_num_batched_tokens rollout.max_num_seqs rollout.n rollout.prompt_length
     rollout.response_length rollout.tensor_model_parallel_size rollout.val_kwargs.n trainer.n_gpus_per_node
     trainer.nnodes trainer.total_epochs"""),
    ("an integer of at least 1, or null", _integer(1, math.inf, None), """
     actor.ppo_micro_batch_size_per_gpu data.val_batch_size machine.threads ray_kwargs.ray_init.num_cpus
     rollout.log_prob_micro_batch_size_per_gpu trainer.max_actor_ckpt_to_keep trainer.max_critic_ckpt_to_keep
     trainer.total_training_steps"""),
    ("an integer of at least 1, or -1 for none", _integer(1, math.inf, -1), """
     actor.fsdp_config.fsdp_size data.train_max_samples data.val_max_samples rollout.top_k rollout.val_kwargs.top_k
     trainer.save_freq trainer.test_freq"""),
    ("an integer of at least 0", _integer(0), """
     algorithm.filter_groups.max_num_gen_batches data.dataloader_num_workers model.lora_rank
     reward.reward_kwargs.overlong_buffer_cfg.len trainer.critic_warmup trainer.log_val_generations"""),
    ("an integer from 0 to 4294967295", _integer(0, 2**32 - 1),  # numpy's largest seed
     "seed actor.data_loader_seed data.seed rollout.seed"),
    ("a number above 0", _number(0), """
     actor.grad_clip actor.optim.clip_grad rollout.temperature watchdog.weight_sync_seconds"""),
    ("a number of at least 0", _number(0, math.inf, 0), """
     actor.clip_ratio actor.clip_ratio_high actor.clip_ratio_low actor.kl_loss_coef actor.optim.lr
     actor.optim.weight_decay algorithm.kl_ctrl.kl_coef critic.optim.lr
     reward.reward_kwargs.overlong_buffer_cfg.penalty_factor rollout.val_kwargs.temperature"""),
    ("a number above 1", _number(1), "actor.clip_ratio_c"),
    ("a number above 0 and at most 1", _number(0, 1), "rollout.top_p rollout.val_kwargs.top_p"),
    ("a number from 0 to 1", _number(0, 1, 0), "algorithm.gamma algorithm.lam"),
)  # fmt: skip


def check_values(config: Any) -> None:
    """Raise ValueError with the key, its value and what is expected, if one of a DictConfig is none of RANGES."""
    from omegaconf import OmegaConf

    for expected, is_good, keys in RANGES:
        for name in keys.split():
            key = f"actor_rollout_ref.{name}" if name.split(".")[0] in ("actor", "rollout", "model") else name
            value = OmegaConf.select(config, key, default=RANGES)
            if value is not RANGES and not is_good(value):
                raise ValueError(f"{key}={value}: expected {expected}: change it")


# What users bring: a Python file (or pkg://module), and what is looked up in it.
CODE = {
    "reward.custom_reward_function.path": "reward.custom_reward_function.name",
    "reward.reward_manager.module.path": "reward.reward_manager.name",
    "trainer.v1.sampler.custom_sampler.path": "trainer.v1.sampler.custom_sampler.name",
    "data.custom_cls.path": "data.custom_cls.name",
}
AGENT, TURNS = "actor_rollout_ref.rollout.agent", "actor_rollout_ref.rollout.multi_turn"
AGENT_LOOPS, TOOLS = f"{AGENT}.agent_loop_config_path", f"{TURNS}.tool_config_path"
FILES = (*CODE, AGENT_LOOPS, TOOLS, f"{TURNS}.function_tool_path")
ROUTER = "actor_rollout_ref.rollout.router_config_path"  # sam_recipe.launch.routing looks for it
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


def connect_users_code(config: Any, overrides: list[str]) -> None:
    """Give legacy keys their present names, and paths the folder that the run starts in: processes start elsewhere.

    Raises:
        ValueError: a legacy key has no successor, or both are given.
    """
    from omegaconf import OmegaConf

    given = {override.lstrip("+").split("=", 1)[0] for override in overrides}
    for old, value in (leaf for section in LEGACY_SECTIONS for leaf in leaves(config.get(section), f"{section}.")):
        new = f"reward.{LEGACY.get(old, old)}"
        parent, _, name = new.rpartition(".")
        is_argument = old.startswith("custom_reward_function.reward_kwargs")
        if not is_argument and name not in (OmegaConf.select(config, parent) or {}):
            raise ValueError(f"{old}={value}: verl 0.9.1 has no such key below reward: remove it")
        if new in given:
            raise ValueError(f"{old}={value}: {new} is given too, and means the same: remove one")
        OmegaConf.update(config, new, value)
        OmegaConf.update(config, old, None)
    for key in (*FILES, ROUTER):
        if (path := OmegaConf.select(config, key)) and isinstance(path, str) and not path.startswith("pkg://"):
            OmegaConf.update(config, key, _located(path))


def leaves(node: Mapping | None, path: str = "") -> Iterator[tuple[str, Any]]:
    """Keys of a node, with `path` in front, and their values; those that are null are left out."""
    for name, value in list((node or {}).items()):
        if isinstance(value, Mapping):
            yield from leaves(value, f"{path}{name}.")
        elif value is not None:
            yield f"{path}{name}", value


def _located(path: str) -> str:
    """The absolute path of a file that is where verl looks: here, then beside and in verl's package."""
    wanted = Path(path.removeprefix("file://")).expanduser()
    verl = Path(importlib.util.find_spec("verl").origin).parent
    found = (folder / wanted for folder in (Path.cwd(), verl.parent, verl))
    return str(next((one for one in found if one.is_file()), path))


def main() -> int:
    options = parse(None)
    if said := misspelt(options.overrides, options.config_name):
        print(f"error: {said} [config.override]", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
