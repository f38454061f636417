"""`python -m recipe.sam_dapo.arguments ARGUMENTS`: a run's options, looked at before anything is installed.

With Python's standard library alone, so that the run scripts answer `--help` at once. What needs a composed config is
below: the values that everything calculates with, and what users bring.
"""

import argparse
import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from sam.command import Parser

CONFIGS = Path(__file__).resolve().with_name("configs")
# Sections whose keys other programs define: what Hydra's `+` may add to.
FREE_SECTIONS = (
    "actor_rollout_ref.actor.fsdp_config",
    "actor_rollout_ref.actor.megatron",
    "actor_rollout_ref.actor.optim",
    "actor_rollout_ref.model.override_config",
    "actor_rollout_ref.rollout.engine_kwargs",
    "custom_reward_function.reward_kwargs",
    "data.apply_chat_template_kwargs",
    "ray_kwargs.ray_init",
    "reward.custom_reward_function.reward_kwargs",
    "reward.reward_kwargs",
    "trainer.v1.sampler.sampler_kwargs",
    "speculation",
)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of a run; ends the process after --help and wrong ones."""
    screen = "The screen shows a line for each step and how the run ended; all output goes to train.log in run_dir."
    parser = Parser(prog="sam run", description="One DAPO run.", epilog=screen, allow_abbrev=False)
    add_config_options(parser, required=True)
    parser.add_argument("--check", action="store_true", help="look at config and machine, and start nothing")
    parser.add_argument("--accept-changes", action="store_true", help="go on with settings that make another curve")
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


def did_you_mean(name: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """What to do about a name that nothing knows; None: none of the known ones is like it."""
    close = difflib.get_close_matches(str(name), list(map(str, known)), 1, likeness)
    return f"did you mean {close[0]}?" if close else None


def _integer(least: int, most: float = math.inf, *others: int | None) -> Callable[[Any], bool]:
    return lambda value: value in others or (type(value) is int and least <= value <= most)


# What is expected, whether a value is that, and the keys with which this project calculates; of others verl and vLLM
# tell. actor., rollout. and model. stand in actor_rollout_ref. A key that the training engine has not is passed over.
RANGES = (
    ("keys below it", lambda value: isinstance(value, Mapping), """
     actor_rollout_ref actor model rollout rollout.engine_kwargs rollout.engine_kwargs.vllm data reward
     reward.reward_kwargs reward.reward_kwargs.overlong_buffer_cfg trainer watchdog"""),
    ("text", lambda value: isinstance(value, str) and bool(value.strip()), "assets data.prompt_key model.path run_dir"),
    ("true or false", lambda value: isinstance(value, bool), """
     algorithm.filter_groups.enable reward.reward_kwargs.overlong_buffer_cfg.enable"""),
    ("an integer of at least 1", _integer(1), """
     actor.fsdp_config.ulysses_sequence_parallel_size actor.megatron.context_parallel_size
     actor.megatron.expert_model_parallel_size actor.megatron.pipeline_model_parallel_size
     actor.megatron.tensor_model_parallel_size actor.ppo_max_token_len_per_gpu actor.ppo_mini_batch_size
     data.gen_batch_size data.max_prompt_length data.max_response_length data.train_batch_size
     reward.reward_kwargs.overlong_buffer_cfg.len rollout.checkpoint_engine.update_weights_bucket_megabytes
     rollout.data_parallel_size rollout.max_num_batched_tokens rollout.max_num_seqs rollout.n
     rollout.tensor_model_parallel_size trainer.n_gpus_per_node trainer.nnodes"""),
    ("an integer of at least 1, or -1 for none", _integer(1, math.inf, -1), "trainer.save_freq"),
    ("an integer of at least 1, or null", _integer(1, math.inf, None), """
     actor.ppo_micro_batch_size_per_gpu machine.threads rollout.log_prob_micro_batch_size_per_gpu
     trainer.max_actor_ckpt_to_keep trainer.total_training_steps"""),
    ("an integer from 0 to 4294967295", _integer(0, 2**32 - 1), "seed"),  # numpy's largest
    ("a number above 0", lambda value: type(value) in (int, float) and 0 < value < math.inf,
     "rollout.temperature watchdog.weight_sync_seconds"),
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


# What users bring: Python files (or pkg://module) and YAML.
FILES = (
    "actor_rollout_ref.rollout.agent.agent_loop_config_path",
    "actor_rollout_ref.rollout.multi_turn.function_tool_path",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path",
    "data.custom_cls.path",
    "reward.custom_reward_function.path",
    "reward.reward_manager.module.path",
    "trainer.v1.sampler.custom_sampler.path",
)


def connect_users_code(config: Any) -> None:
    """Give paths of users' files the folder that the run starts in; ValueError where one is no file."""
    from omegaconf import OmegaConf

    for key in (*FILES, "actor_rollout_ref.rollout.router_config_path"):
        value = OmegaConf.select(config, key)
        if not value or str(value).startswith("pkg://"):
            continue
        path = Path(str(value).removeprefix("file://")).expanduser().absolute()
        if path.is_file():
            OmegaConf.update(config, key, str(path))
        elif key in FILES:
            raise ValueError(f"{key}={value}: no such file: correct it")


if __name__ == "__main__":
    parse(None)
