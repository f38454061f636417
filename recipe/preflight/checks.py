"""Everything that can be found wrong before a process is started, each with its mend in one line."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from recipe.launch import environment, run_lock, versions
from recipe.launch.config import ConfigError
from recipe.preflight import (
    ascend,
    cluster,
    config_keys,
    device_memory,
    environment_variables,
    files,
    machine,
    vllm_command,
)
from recipe.preflight.problem import Problem

# Sizes of a replica: vLLM's argument, and the key of verl's rollout section.
ENGINE_SIZES = {
    "tensor_parallel_size": "tensor_model_parallel_size",
    "data_parallel_size": "data_parallel_size",
    "pipeline_parallel_size": "pipeline_model_parallel_size",
}


def check(config: DictConfig, to_be_built: Path | None = None) -> None:
    """Raise ConfigError with the first problem found, and how many more there are.

    vLLM is asked last, because an answer that is not known yet takes 10 s.

    Args:
        to_be_built: a directory whose files may be missing still.
    """
    problems = list(find_problems(config, to_be_built)) or list(vllm_command.find_problems(config))
    if problems:
        more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(problems[0] + more)


def find_problems(config: DictConfig, to_be_built: Path | None = None) -> Iterator[Problem]:
    for check_ in checks(config, to_be_built).values():
        yield from check_


def checks(config: DictConfig, to_be_built: Path | None = None) -> dict[str, Iterator[Problem]]:
    """Problems by subject, found when they are asked for. None of these starts or imports anything that takes long."""
    is_npu = config.trainer.device == "npu"
    return {
        "start": _start(config, to_be_built),
        "versions": _versions(config),
        "Ascend: pairing and patches": ascend.installation_problems() if is_npu else iter(()),
        "Ascend: settings": ascend.setting_problems(config) if is_npu else iter(()),
        "variables": environment_variables.find_problems(),
        "keys": config_keys.find_problems(config),
        "data and model": files.find_problems(config, to_be_built),
        "batches": _batches(config),
        "lengths": _lengths(config),
        "parallel sizes": _parallel_sizes(config),
        "token budgets": _token_budgets(config),
        "memory of a device": device_memory.find_problems(config),
        "memory, disk and ports of this machine": machine.find_problems(config),
    }


# What may differ from node to node.
NODE_SUBJECTS = (
    "versions",
    "Ascend: pairing and patches",
    "variables",
    "data and model",
    "memory, disk and ports of this machine",
)


def node_problems(content: dict) -> list[Problem]:
    """Runs on a node of a cluster, in the environment that `ray start` gave its Ray."""
    os.environ.setdefault("RAY_ADDRESS", "auto")  # Ray runs here: its ports and memory are taken by itself
    subjects = checks(OmegaConf.create(content))
    return [problem for name in NODE_SUBJECTS for problem in subjects[name]]


def find_warnings(config: DictConfig) -> Iterator[str]:
    """What costs time but breaks nothing."""
    if config.trainer.device == "npu":
        yield from ascend.find_warnings(config)
    # On a laptop nobody waits for the curves.
    if config.trainer.device != "cpu" and "wandb" in config.trainer.logger and not environment.has_wandb_key():
        yield (
            f"no key of wandb's here: the run is kept in {config.run_dir}/wandb, for wandb sync later; to watch it, "
            "run wandb login on every node, or set WANDB_API_KEY where Ray is started"
        )


def _start(config: DictConfig, to_be_built: Path | None) -> Iterator[Problem]:
    yield from cluster.start_problems(config)
    # What is still to be built is checked for several runs at once, each with a directory of its own.
    if to_be_built is None and (problem := run_lock.lock_problem(Path(config.run_dir))):
        yield Problem("run_dir.in_use", problem)


def _versions(config: DictConfig) -> Iterator[Problem]:
    required = {**versions.REQUIRED, "torch": versions.TORCH[config.trainer.device]}
    for package, wanted in required.items():
        found = versions.installed(package)
        if found != wanted:
            yield Problem(
                "package.version",
                f"{package} {found or 'is not installed'}: this recipe is written for {package}=={wanted}; "
                "install the pins of requirements/",
            )
    if config.speculation.method == "suffix" and versions.installed("arctic-inference") is None:
        yield Problem(
            "package.suffix",
            "speculation=suffix needs arctic-inference, which is not installed: "
            "install the extra `peers` (requirements/peers.txt)",
        )
    yield from _training_packages(config)


def _training_packages(config: DictConfig) -> Iterator[Problem]:
    """What the pins of requirements/ do not hold: none of it comes as a wheel for every device."""
    device, actor = config.trainer.device, config.actor_rollout_ref.actor
    if device_memory.uses_megatron(config):
        needed = ["megatron.core", "mbridge" if actor.megatron.vanilla_mbridge else "megatron.bridge"]
        if missing := [name for name in needed + ["mindspeed"] * (device == "npu") if not is_importable(name)]:
            yield Problem(
                "package.megatron",
                f"training with Megatron needs {' and '.join(missing)}, not installed here (docs/cluster.md); a "
                "dense model trains without, with training=fsdp2",
            )
        return
    attention = config.actor_rollout_ref.model.override_config.get("attn_implementation", "flash_attention_2")
    if device == "cuda" and attention == "flash_attention_2" and not is_importable("flash_attn"):
        yield Problem(
            "package.flash_attention",
            "training would use flash_attention_2, and flash-attn is not installed: install it, or set "
            "actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        )
    if (ranks := actor.fsdp_config.ulysses_sequence_parallel_size) > 1 and attention != "flash_attention_2":
        yield Problem(
            "package.flash_attention",
            f"actor.fsdp_config.ulysses_sequence_parallel_size={ranks}, attn_implementation={attention}: verl splits "
            "sequences in flash_attention_2 only: set actor_rollout_ref.model.override_config.attn_implementation to "
            "that, or the size to 1",
        )


def is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is not there
        return False


def _batches(config: DictConfig) -> Iterator[Problem]:
    train, generated, mini = (
        config.data.train_batch_size,
        config.data.gen_batch_size,
        config.actor_rollout_ref.actor.ppo_mini_batch_size,
    )
    samples = config.actor_rollout_ref.rollout.n
    if train % mini:
        yield Problem(
            "batch.mini",
            f"data.train_batch_size={train} is not a multiple of actor.ppo_mini_batch_size={mini}: change one",
        )
    filtering = config.algorithm.filter_groups.enable
    if filtering and generated < train:
        yield Problem(
            "batch.generation",
            f"data.gen_batch_size={generated} is below data.train_batch_size={train}: a round must be able to fill it",
        )
    if not filtering and train % generated:
        yield Problem(
            "batch.generation",
            f"data.gen_batch_size={generated} does not divide data.train_batch_size={train}, which it must without "
            "dynamic sampling: set it to the same",
        )
    dies = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if train * samples % dies:
        yield Problem(
            "batch.devices",
            f"train_batch_size x rollout.n = {train * samples} is not a multiple of the {dies} devices: change one",
        )
    else:
        yield from _micro_batches(config, train * samples // dies, mini * samples // dies)
    if filtering and samples < 2:
        yield Problem(
            "batch.samples",
            f"actor_rollout_ref.rollout.n={samples}: dynamic sampling compares the samples of a prompt, use 2 or more",
        )


def _micro_batches(config: DictConfig, batch: int, mini_batch: int) -> Iterator[Problem]:
    """`batch` and `mini_batch` in responses of one device."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    for key, size, total, dynamic in (
        ("actor.ppo_micro_batch_size_per_gpu", actor.ppo_micro_batch_size_per_gpu, mini_batch, actor.use_dynamic_bsz),
        (
            "rollout.log_prob_micro_batch_size_per_gpu",
            rollout.log_prob_micro_batch_size_per_gpu,
            batch,
            rollout.log_prob_use_dynamic_bsz,
        ),
    ):
        if not dynamic and size and total % size:
            yield Problem(
                "batch.micro",
                f"actor_rollout_ref.{key}={size} does not divide the {total} responses it gets: change it",
            )


def _lengths(config: DictConfig) -> Iterator[Problem]:
    needed = config.data.max_prompt_length + config.data.max_response_length
    longest = vllm_command.server_arguments(config)["max_model_len"]
    if isinstance(longest, int) and longest < needed:
        yield Problem(
            "length.model",
            f"{vllm_command.key_of('max_model_len', config)}={longest} is below data.max_prompt_length + "
            f"max_response_length = {needed}: raise it",
        )
    overlong = config.reward.reward_kwargs.overlong_buffer_cfg
    if overlong.enable and not 0 < overlong.len <= config.data.max_response_length:
        yield Problem(
            "length.overlong_buffer",
            f"reward.reward_kwargs.overlong_buffer_cfg.len={overlong.len}: expected 1 to data.max_response_length="
            f"{config.data.max_response_length}",
        )


def _parallel_sizes(config: DictConfig) -> Iterator[Problem]:
    rollout = config.actor_rollout_ref.rollout
    dies = config.trainer.nnodes * config.trainer.n_gpus_per_node
    replica = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    if dies % replica:
        yield Problem(
            "parallel.rollout",
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={rollout.tensor_model_parallel_size} x "
            f"data_parallel_size={rollout.data_parallel_size} does not divide the {dies} devices: change one",
        )
    for name, size in (rollout.engine_kwargs.get("vllm") or {}).items():
        # verl places its workers by the keys of its own, whatever vLLM is told here.
        if name in ENGINE_SIZES and size != rollout[ENGINE_SIZES[name]]:
            yield Problem(
                "parallel.engine_kwargs",
                f"actor_rollout_ref.rollout.engine_kwargs.vllm.{name}={size}: verl places workers by "
                f"rollout.{ENGINE_SIZES[name]}={rollout[ENGINE_SIZES[name]]}: remove it, set that one",
            )
    if rollout.expert_parallel_size not in (1, replica):
        yield Problem(
            "parallel.expert",
            f"rollout.expert_parallel_size={rollout.expert_parallel_size}: vLLM spreads experts over 1 or all "
            f"{replica} devices of a replica",
        )
    if device_memory.uses_megatron(config):
        yield from _megatron_sizes(config.actor_rollout_ref.actor.megatron, dies)


def _megatron_sizes(sizes: DictConfig, dies: int) -> Iterator[Problem]:
    model = sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size * sizes.context_parallel_size
    if dies % model:
        yield Problem(
            "parallel.megatron",
            f"actor.megatron: tensor x pipeline x context = {model} does not divide the {dies} devices: change one",
        )
    elif dies // sizes.pipeline_model_parallel_size % sizes.expert_model_parallel_size:
        yield Problem(
            "parallel.megatron",
            f"actor.megatron.expert_model_parallel_size={sizes.expert_model_parallel_size} does not divide the "
            f"{dies // sizes.pipeline_model_parallel_size} devices of a pipeline stage: change it",
        )


def _token_budgets(config: DictConfig) -> Iterator[Problem]:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    is_megatron = device_memory.uses_megatron(config)
    name = "context_parallel_size" if is_megatron else "ulysses_sequence_parallel_size"
    ranks = (actor.megatron if is_megatron else actor.fsdp_config)[name]
    longest = config.data.max_prompt_length + config.data.max_response_length
    if actor.use_dynamic_bsz and (room := actor.ppo_max_token_len_per_gpu * ranks) < longest:
        yield Problem(
            "tokens.update",
            f"actor.ppo_max_token_len_per_gpu x {name} = {room} is below the longest sequence, {longest}: raise it",
        )
    drafted = config.speculation.num_speculative_tokens if config.speculation.method != "off" else 0
    if rollout.max_num_batched_tokens < (needed := rollout.max_num_seqs * (1 + drafted)):
        yield Problem(
            "tokens.rollout",
            f"rollout.max_num_batched_tokens={rollout.max_num_batched_tokens} is below max_num_seqs x (1 + "
            f"num_speculative_tokens) = {needed}, one step of full decoding: raise it",
        )
