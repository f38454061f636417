"""Kinds and ranges of values that hold whatever the rest of a config says: checked before anything reads them."""

import math
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf

ABSENT = object()


def _integer(least: int, most: float = math.inf, *others: int | None) -> Callable[[Any], bool]:
    return lambda value: value in others or (type(value) is int and least <= value <= most)


def _number(above: float, most: float = math.inf, *others: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and (above < value <= most or value in others) and value < math.inf


# What is expected, whether a value is that, and the keys; actor., rollout. and model. stand in actor_rollout_ref. A key
# that the training engine has not is passed over.
RANGES = (
    (
        "keys below it",
        lambda value: isinstance(value, DictConfig),
        """actor_rollout_ref actor model model.override_config rollout rollout.engine_kwargs rollout.engine_kwargs.vllm
        custom_reward_function data machine reward reward.reward_kwargs reward.reward_kwargs.overlong_buffer_cfg
        reward_model sandbox_fusion trainer watchdog""",
    ),
    (
        "text",
        lambda value: isinstance(value, str) and bool(value.strip()),
        "assets data.prompt_key model.path run_dir trainer.default_local_dir",
    ),
    ("text, or null", lambda value: value is None or isinstance(value, str), "model.custom_chat_template"),
    (
        "true or false",
        lambda value: isinstance(value, bool),
        """algorithm.filter_groups.enable reward.reward_kwargs.overlong_buffer_cfg.enable
        reward.reward_kwargs.overlong_buffer_cfg.log""",
    ),
    (
        "an integer of at least 1",
        _integer(1),
        """actor.fsdp_config.ulysses_sequence_parallel_size actor.megatron.context_parallel_size
        actor.megatron.expert_model_parallel_size actor.megatron.pipeline_model_parallel_size
        actor.megatron.tensor_model_parallel_size actor.ppo_epochs actor.ppo_max_token_len_per_gpu
        actor.ppo_mini_batch_size data.gen_batch_size
        data.max_prompt_length data.max_response_length data.train_batch_size reward.num_workers
        rollout.agent.num_workers rollout.checkpoint_engine.update_weights_bucket_megabytes
        rollout.data_parallel_size rollout.max_num_batched_tokens rollout.max_num_seqs rollout.n
        rollout.prompt_length rollout.response_length rollout.tensor_model_parallel_size rollout.val_kwargs.n
        trainer.n_gpus_per_node trainer.nnodes trainer.total_epochs""",
    ),
    (
        "an integer of at least 1, or null",
        _integer(1, math.inf, None),
        """actor.ppo_micro_batch_size_per_gpu data.val_batch_size machine.threads ray_kwargs.ray_init.num_cpus
        rollout.log_prob_micro_batch_size_per_gpu trainer.max_actor_ckpt_to_keep trainer.max_critic_ckpt_to_keep
        trainer.total_training_steps""",
    ),
    (
        "an integer of at least 1, or -1 for none",
        _integer(1, math.inf, -1),
        """actor.fsdp_config.fsdp_size
        data.train_max_samples data.val_max_samples rollout.top_k rollout.val_kwargs.top_k trainer.save_freq
        trainer.test_freq""",
    ),
    (
        "an integer of at least 0",
        _integer(0),
        """algorithm.filter_groups.max_num_gen_batches data.dataloader_num_workers model.lora_rank
        reward.reward_kwargs.overlong_buffer_cfg.len
        trainer.critic_warmup trainer.log_val_generations""",
    ),
    (
        "an integer from 0 to 4294967295",  # numpy's largest seed
        _integer(0, 2**32 - 1),
        "seed actor.data_loader_seed data.seed rollout.seed",
    ),
    ("a number of seconds above 0", _number(0), "watchdog.weight_sync_seconds"),
    ("a number above 0", _number(0), "actor.grad_clip actor.optim.clip_grad rollout.temperature"),
    (
        "a number of at least 0",
        _number(0, math.inf, 0),
        """actor.clip_ratio actor.clip_ratio_high actor.clip_ratio_low actor.kl_loss_coef actor.optim.lr
        actor.optim.weight_decay algorithm.kl_ctrl.kl_coef critic.optim.lr
        reward.reward_kwargs.overlong_buffer_cfg.penalty_factor rollout.val_kwargs.temperature""",
    ),
    ("a number above 1", _number(1), "actor.clip_ratio_c"),
    ("a number above 0 and at most 1", _number(0, 1), "rollout.top_p rollout.val_kwargs.top_p"),
    ("a number from 0 to 1", _number(0, 1, 0), "algorithm.gamma algorithm.lam"),
)


def check(config: DictConfig) -> None:
    """Raise ValueError with the key, its value and what is expected, if one is of another kind or out of range."""
    for expected, is_good, keys in RANGES:
        for name in keys.split():
            key = f"actor_rollout_ref.{name}" if name.split(".")[0] in ("actor", "rollout", "model") else name
            value = OmegaConf.select(config, key, default=ABSENT)
            if value is not ABSENT and not is_good(value):
                raise ValueError(f"{key}={value}: expected {expected}: change it")
