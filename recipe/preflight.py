"""Everything that can be found wrong before a process is started, each with its mend in one line."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil
from omegaconf import DictConfig

from recipe import versions
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
    yield from _versions(config)
    yield from _files(config, to_be_built)
    yield from _batches(config)
    yield from _lengths(config)
    yield from _resources(config)


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
            if is_missing(Path(name).expanduser()):
                yield f"data.{key}={name}: no such file; make it with {_maker(config)}"
    model = Path(config.actor_rollout_ref.model.path).expanduser()
    if is_missing(model / "config.json"):
        yield f"actor_rollout_ref.model.path={model}: no config.json there; make it with {_maker(config)}"


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
