"""The settings of a run, kept in its directory, and which of them have changed when it is resumed."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

CONFIG_FILE = "config.yaml"
# Where a run lies, how fast it is, how often it saves and what it shows: none of it changes what is learnt, but for the
# order in which numbers are added.
HARMLESS = """
    run_dir assets assets_command drafters machine watchdog routing speculation ray_kwargs transfer_queue
    global_profiler trainer.project_name trainer.experiment_name trainer.logger trainer.log_val_generations
    trainer.rollout_data_dir trainer.validation_data_dir trainer.save_freq trainer.test_freq trainer.val_before_train
    trainer.val_only trainer.resume_mode trainer.resume_from_path trainer.default_local_dir trainer.default_hdfs_dir
    trainer.max_actor_ckpt_to_keep trainer.max_critic_ckpt_to_keep trainer.total_epochs trainer.total_training_steps
    data.val_files data.val_batch_size data.val_max_samples data.dataloader_num_workers
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    ROLLOUT.gpu_memory_utilization ROLLOUT.max_num_seqs ROLLOUT.max_num_batched_tokens ROLLOUT.enforce_eager
    ROLLOUT.free_cache_engine ROLLOUT.enable_sleep_mode ROLLOUT.val_kwargs ROLLOUT.agent.num_workers
    ROLLOUT.checkpoint_engine ROLLOUT.disable_log_stats ROLLOUT.enable_prefix_caching
    ROLLOUT.log_prob_micro_batch_size_per_gpu ROLLOUT.log_prob_max_token_len_per_gpu
    ROLLOUT.trace ROLLOUT.profiler ROLLOUT.prometheus actor_rollout_ref.actor.profiler
    ROLLOUT.engine_kwargs.vllm.additional_config ROLLOUT.engine_kwargs.vllm.speculative_config
    ROLLOUT.engine_kwargs.vllm.async_scheduling
""".replace("ROLLOUT", "actor_rollout_ref.rollout").split()
NOT_HARMLESS = ("speculation.verification",)  # other tokens, of the same distribution
SCHEDULES = ("lr_scheduler_type", "lr_decay_style")
LENGTHS = ("trainer.total_epochs", "trainer.total_training_steps")
UNSET = object()


def changes(run_directory: Path, config: DictConfig) -> tuple[list[str], list[str]]:
    """Settings that differ from those the directory holds, as `key before -> now`: that make another curve, and others.

    Raises:
        ValueError: the file cannot be read; one line.
    """
    path = run_directory / CONFIG_FILE
    try:
        found = differences(OmegaConf.to_container(OmegaConf.load(path)), OmegaConf.to_container(config))
    except Exception as error:  # YAML's and OmegaConf's, which share no class
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} cannot be read ({reason}): what settings the run had is not known") from error
    optimizer = config.actor_rollout_ref.actor.optim
    is_constant = all(optimizer.get(name) in (None, "constant") for name in SCHEDULES)
    curve, others = [], []
    for key, (old, new) in found.items():
        harmless = _below(key, HARMLESS) and not _below(key, NOT_HARMLESS) and (is_constant or key not in LENGTHS)
        (others if harmless else curve).append(f"{key} {old} -> {new}")
    return curve, others


def differences(before: dict, now: dict) -> dict[str, tuple[str, str]]:
    """Dotted keys whose values differ, with both values as texts.

    Example:
        >>> differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": None}, "d": 4})
        {'a.c': ('2', 'null'), 'd': ('not set', '4')}
    """
    before, now = _flat(before), _flat(now)
    pairs = {key: (before.get(key, UNSET), now.get(key, UNSET)) for key in sorted(before.keys() | now.keys())}
    return {key: (_shown(old), _shown(new)) for key, (old, new) in pairs.items() if old != new}


def keep(run_directory: Path, config: DictConfig, until_step: int | None) -> None:
    """Write a config into the directory; the one that a run had until a step stays beside it where they differ."""
    path, made = run_directory / CONFIG_FILE, OmegaConf.to_yaml(config, resolve=True)
    if until_step is not None and path.exists() and path.read_text() != made:
        kept, number = run_directory / f"config.until_step_{until_step}.yaml", 1
        while kept.exists():
            kept, number = run_directory / f"config.until_step_{until_step}.{number + 1}.yaml", number + 1
        path.rename(kept)
    path.write_text(made)


def _below(key: str, sections: Iterable[str]) -> bool:
    return any(f"{key}.".startswith(f"{section}.") for section in sections)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {f"{prefix}{name}": value}
    return found


def _shown(value: Any) -> str:
    return "not set" if value is UNSET else "null" if value is None else str(value)
