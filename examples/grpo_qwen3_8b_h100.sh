#!/usr/bin/env bash
# Qwen3-8B by GRPO on one node of 8 GPUs with 80 GB, in verl's own trainer, with drafts:
#   bash examples/grpo_qwen3_8b_h100.sh [overrides]     SPECULATION=off: the same run without drafts
# The settings are those of verl 0.9.1's examples/grpo_trainer/run_qwen3_8b_fsdp.sh, and two more turn drafts on. That script
# takes the two as words, too. It needs verl 0.9.1 with vLLM 0.24 and this project (docs/use_with_your_run.md), and data of
# verl's examples/data_preprocess. MODEL_PATH and DATA_DIR may be set.
#
# Memory of a GPU, estimated: 54 GiB while it trains; 48 while it generates.
# It works if the log has `rollout worker: drafter AsyncSamProposer, verification exact`, and if
# `rollout/spec_accept_length` is above 1. Compare `timing_s/gen` with that of SPECULATION=off.
# A test composes it, and asks verl and vLLM; nobody has run it on GPUs yet.
set -euo pipefail

DATA_DIR="${DATA_DIR:-$HOME/data}"
drafts=('hydra.searchpath=[pkg://sam.configs]' "+speculation=${SPECULATION:-sam}")

exec python -m verl.trainer.main_ppo "${drafts[@]}" \
    algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=false \
    "data.train_files=[$DATA_DIR/gsm8k/train.parquet,$DATA_DIR/math/train.parquet]" \
    "data.val_files=[$DATA_DIR/gsm8k/test.parquet,$DATA_DIR/math/test.parquet]" \
    data.train_batch_size=1024 data.max_prompt_length=1024 data.max_response_length=2048 \
    data.filter_overlong_prompts=true data.truncation=error \
    actor_rollout_ref.model.path="${MODEL_PATH:-Qwen/Qwen3-8B}" \
    actor_rollout_ref.model.use_remove_padding=true actor_rollout_ref.model.enable_gradient_checkpointing=true \
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=256 \
    actor_rollout_ref.actor.use_dynamic_bsz=true actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576 \
    actor_rollout_ref.actor.use_kl_loss=true actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 actor_rollout_ref.rollout.n=5 \
    actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24576 \
    actor_rollout_ref.ref.log_prob_use_dynamic_bsz=true actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=24576 \
    actor_rollout_ref.ref.fsdp_config.param_offload=true \
    trainer.use_v1=true trainer.n_gpus_per_node=8 trainer.nnodes=1 trainer.save_freq=20 trainer.test_freq=5 \
    trainer.total_epochs=15 trainer.project_name=sam_examples trainer.experiment_name=qwen3_8b_grpo \
    'trainer.logger=[console]' "$@"
