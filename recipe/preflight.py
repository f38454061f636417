"""Everything that can be found wrong before a process is started, each with its mend in one line."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
from omegaconf import DictConfig

from recipe import preflight_ascend, preflight_memory, preflight_variables, versions
from recipe.configuration import ConfigError

MINIMUM_MEMORY_GIB = {"cpu": 10}
MINIMUM_DISK_GIB = {"cpu": 3}


def check(config: DictConfig, to_be_built: Path | None = None) -> None:
    """Raise ConfigError with the first problem found, and how many more there are.

    `to_be_built`: a directory whose files may be missing still.
    """
    problems = list(find_problems(config, to_be_built))
    if problems:
        more = f" ({len(problems) - 1} more)" if len(problems) > 1 else ""
        raise ConfigError(problems[0] + more)


def find_problems(config: DictConfig, to_be_built: Path | None = None) -> Iterator[str]:
    for check_ in checks(config, to_be_built).values():
        yield from check_


def checks(config: DictConfig, to_be_built: Path | None = None) -> dict[str, Iterator[str]]:
    """Problems by subject, found when they are asked for. None of these starts or imports anything that takes long."""
    is_npu = config.trainer.device == "npu"
    return {
        "versions": _versions(config),
        "Ascend: pairing and patches": preflight_ascend.installation_problems() if is_npu else iter(()),
        "Ascend: settings": preflight_ascend.setting_problems(config) if is_npu else iter(()),
        "variables": preflight_variables.find_problems(),
        "data and model": _files(config, to_be_built),
        "batches": _batches(config),
        "lengths": _lengths(config),
        "parallel sizes": _parallel_sizes(config),
        "memory of a device": preflight_memory.find_problems(config),
        "memory and disk of this machine": _resources(config),
    }


def find_warnings(config: DictConfig) -> Iterator[str]:
    """What costs time but breaks nothing."""
    if config.trainer.device == "npu":
        yield from preflight_ascend.find_warnings(config)


def _versions(config: DictConfig) -> Iterator[str]:
    required = {**versions.REQUIRED, "torch": versions.TORCH[config.trainer.device]}
    for package, wanted in required.items():
        found = versions.installed(package)
        if found != wanted:
            yield (
                f"{package} {found or 'is not installed'}: this recipe is written for {package}=={wanted}; "
                "install the pins of requirements/"
            )
    if config.speculation.method == "suffix" and versions.installed("arctic-inference") is None:
        yield (
            "speculation=suffix needs arctic-inference, which is not installed: "
            "install the extra `peers` (requirements/peers.txt)"
        )


def _files(config: DictConfig, to_be_built: Path | None) -> Iterator[str]:
    def is_missing(path: Path) -> bool:
        return not path.is_file() and (to_be_built is None or to_be_built not in path.parents)

    for key in ("train_files", "val_files"):
        value = config.data[key]
        for name in [value] if isinstance(value, str) else value:
            path = Path(name).expanduser()
            if is_missing(path):
                yield f"data.{key}={name}: no such file; make it with {_maker(config)}"
            elif path.is_file() and path.stat().st_size and (missing := _missing_columns(path)):
                yield f"data.{key}={name}: {missing}; make it with {_maker(config)}"
    model = Path(config.actor_rollout_ref.model.path).expanduser()
    if is_missing(model / "config.json"):
        yield f"actor_rollout_ref.model.path={model}: no config.json there; make it with {_maker(config)}"
    elif is_missing(model / "tokenizer_config.json"):
        yield f"actor_rollout_ref.model.path={model}: no tokenizer_config.json there; fetch the whole model"


def _missing_columns(path: Path) -> str | None:
    import pyarrow.parquet  # a quarter of a second, and only where there are data

    try:
        found = set(pyarrow.parquet.read_schema(path).names)
    except (OSError, ValueError) as error:
        return f"no parquet file ({str(error).splitlines()[0]})"
    missing = [name for name in ("data_source", "prompt", "reward_model") if name not in found]
    return f"column {missing[0]} is missing" if missing else None


def _maker(config: DictConfig) -> str:
    if config.trainer.device == "cpu":
        return f"python -m recipe.tiny.assets --output {config.get('assets', 'outputs/tiny_assets')}"
    return "bash scripts/prepare_data.sh, or point the key at your own"


def _batches(config: DictConfig) -> Iterator[str]:
    train, generated, mini = (
        config.data.train_batch_size,
        config.data.gen_batch_size,
        config.actor_rollout_ref.actor.ppo_mini_batch_size,
    )
    samples = config.actor_rollout_ref.rollout.n
    for key, value in {
        "data.train_batch_size": train,
        "data.gen_batch_size": generated,
        "actor_rollout_ref.actor.ppo_mini_batch_size": mini,
        "actor_rollout_ref.rollout.n": samples,
    }.items():
        if not isinstance(value, int) or value < 1:
            yield f"{key}={value}: expected a positive integer"
            return
    if train % mini:
        yield f"data.train_batch_size={train} is not a multiple of actor.ppo_mini_batch_size={mini}: change one"
    filtering = config.algorithm.filter_groups.enable
    if filtering and generated < train:
        yield f"data.gen_batch_size={generated} is below data.train_batch_size={train}: a round must be able to fill it"
    if not filtering and train % generated:
        yield (
            f"data.gen_batch_size={generated} does not divide data.train_batch_size={train}, which it must without "
            "dynamic sampling: set it to the same"
        )
    dies = config.trainer.nnodes * config.trainer.n_gpus_per_node
    if train * samples % dies:
        yield f"train_batch_size x rollout.n = {train * samples} is not a multiple of the {dies} devices: change one"
    else:
        yield from _micro_batches(config, train * samples // dies, mini * samples // dies)
    if filtering and samples < 2:
        yield f"actor_rollout_ref.rollout.n={samples}: dynamic sampling compares the samples of a prompt, use 2 or more"


def _micro_batches(config: DictConfig, batch: int, mini_batch: int) -> Iterator[str]:
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
            yield f"actor_rollout_ref.{key}={size} does not divide the {total} responses it gets: change it"


def _lengths(config: DictConfig) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    needed = config.data.max_prompt_length + config.data.max_response_length
    if rollout.max_model_len is not None and rollout.max_model_len < needed:
        yield (
            f"rollout.max_model_len={rollout.max_model_len} is below data.max_prompt_length + max_response_length "
            f"= {needed}: raise it"
        )
    overlong = config.reward.reward_kwargs.overlong_buffer_cfg
    if overlong.enable and not 0 < overlong.len <= config.data.max_response_length:
        yield (
            f"reward.reward_kwargs.overlong_buffer_cfg.len={overlong.len}: expected 1 to data.max_response_length="
            f"{config.data.max_response_length}"
        )


def _parallel_sizes(config: DictConfig) -> Iterator[str]:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    dies = config.trainer.nnodes * config.trainer.n_gpus_per_node
    replica = rollout.tensor_model_parallel_size * rollout.data_parallel_size
    if dies % replica:
        yield (
            f"rollout.tensor_model_parallel_size x data_parallel_size = {replica} does not divide the {dies} devices: "
            "change one"
        )
    if rollout.expert_parallel_size not in (1, replica):
        yield (
            f"rollout.expert_parallel_size={rollout.expert_parallel_size}: vLLM spreads experts over 1 or all "
            f"{replica} devices of a replica"
        )
    if actor.strategy != "megatron":
        return
    sizes = actor.megatron
    model = sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size * sizes.context_parallel_size
    if dies % model:
        yield f"actor.megatron: tensor x pipeline x context = {model} does not divide the {dies} devices: change one"
    elif dies // sizes.pipeline_model_parallel_size % sizes.expert_model_parallel_size:
        yield (
            f"actor.megatron.expert_model_parallel_size={sizes.expert_model_parallel_size} does not divide the "
            f"{dies // sizes.pipeline_model_parallel_size} devices of a pipeline stage: change it"
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    room = actor.ppo_max_token_len_per_gpu * sizes.context_parallel_size
    if actor.use_dynamic_bsz and room < longest:
        yield (
            f"actor.ppo_max_token_len_per_gpu x context_parallel_size = {room} is below the longest sequence, "
            f"{longest}: raise it"
        )


def _resources(config: DictConfig) -> Iterator[str]:
    device = config.trainer.device
    memory = psutil.virtual_memory().available / 2**30
    if memory < (wanted := MINIMUM_MEMORY_GIB.get(device, 0)):
        yield f"{memory:.1f} GiB of memory are free, {wanted} are needed: stop other programs"
    place = Path(config.run_dir)
    while not place.exists():
        place = place.parent
    disk = shutil.disk_usage(place).free / 2**30
    if disk < (wanted := MINIMUM_DISK_GIB.get(device, 0)):
        yield f"{disk:.1f} GiB of disk are free below {place}, {wanted} are needed: free some or set run_dir"


if __name__ == "__main__":
    from recipe.preflight_report import main

    sys.exit(main())
