"""The settings that a run had, in its config.yaml, and what differs from them when it goes on."""

import shutil
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from sam.record import replacing
from sam.record.responses import CONFIG_FILE

# Where a run lies, how fast it is, how often it saves and what it shows: not what is learnt, but for the order in which
# numbers are added. All keys below these are meant, too.
HARMLESS = """
    run_dir assets assets_command drafters machine watchdog routing speculation ray_kwargs transfer_queue
    data.val_files global_profiler
    trainer.experiment_name trainer.project_name trainer.logger trainer.save_freq trainer.test_freq trainer.val_only
    trainer.val_before_train trainer.resume_mode trainer.resume_from_path trainer.default_local_dir
    trainer.max_actor_ckpt_to_keep trainer.total_epochs trainer.total_training_steps
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
    actor_rollout_ref.actor.profiler
    actor_rollout_ref.rollout.gpu_memory_utilization actor_rollout_ref.rollout.max_num_seqs
    actor_rollout_ref.rollout.max_num_batched_tokens actor_rollout_ref.rollout.enforce_eager
    actor_rollout_ref.rollout.router_config_path actor_rollout_ref.rollout.engine_kwargs.vllm
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu
    actor_rollout_ref.rollout.trace actor_rollout_ref.rollout.profiler actor_rollout_ref.rollout.prometheus
""".split()
NOT_HARMLESS = "speculation.verification"  # other tokens, of the same distribution


def changes(run_directory: Path, config: DictConfig) -> tuple[list[str], list[str]]:
    """Settings that differ from those the directory holds, as `key before -> now`: that make another curve, and others.

    Raises:
        ValueError: the file cannot be read.
    """
    path = run_directory / CONFIG_FILE
    try:
        changed = differences(OmegaConf.to_container(OmegaConf.load(path)), OmegaConf.to_container(config))
    except Exception as error:  # YAML's and OmegaConf's, which share no class
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} cannot be read ({reason}): what settings the run had is not known") from error
    curve = []
    others = []
    for key, (old, new) in changed.items():
        lines = others if is_harmless(key) else curve
        lines.append(f"{key} {old} -> {new}")
    return curve, others


def is_harmless(key: str) -> bool:
    """Whether a run may go on with another value without a word."""
    if key == NOT_HARMLESS:
        return False
    return any(f"{key}.".startswith(f"{section}.") for section in HARMLESS)


def differences(before: dict, now: dict) -> dict[str, tuple[str, str]]:
    """Dotted keys whose values differ, with both values as texts.

    Example:
        >>> differences({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": None}, "d": 4})
        {'a.c': ('2', 'null'), 'd': ('not set', '4')}
    """
    old = _flat(before)
    new = _flat(now)
    changed = {}
    for key in sorted(old.keys() | new.keys()):
        pair = (old.get(key, "not set"), new.get(key, "not set"))
        if pair[0] != pair[1]:
            changed[key] = (_as_text(pair[0]), _as_text(pair[1]))
    return changed


def _as_text(value: Any) -> str:
    return "null" if value is None else str(value)


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = _with_todays_name(value)
    return flat


def _with_todays_name(value: Any) -> Any:
    """A setting with this package's name of today: up to 0.2.0 it was `sam_recipe`, which run directories name."""
    return value.replace("sam_recipe.", "recipe.sam_dapo.") if isinstance(value, str) else value


def keep(run_directory: Path, config: DictConfig, until_step: int | None) -> None:
    """Write a config into the directory; the first that a run had until a step stays beside it where they differ."""
    path = run_directory / CONFIG_FILE
    text = OmegaConf.to_yaml(config, resolve=True)
    if until_step is not None and path.exists() and path.read_text() != text:
        kept = run_directory / f"config.until_step_{until_step}.yaml"
        if not kept.exists():
            with replacing(kept) as partial:
                shutil.copyfile(path, partial)
    with replacing(path) as partial:
        partial.write_text(text)
