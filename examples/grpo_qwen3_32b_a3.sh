#!/usr/bin/env bash
# Qwen3-32B by GRPO on 2 nodes of Ascend A3 (32 dies), in verl's own trainer with FSDP2, with drafts:
#   bash examples/grpo_qwen3_32b_a3.sh [overrides]      SPECULATION=off: the same run without drafts
# On every node: verl 0.9.1, vllm-ascend 0.23.0.post1 with the two patches, this project, and Ray (docs/ascend.md,
# docs/cluster.md). On the head node: this script. MODEL_PATH and DATA_DIR are folders that both nodes see.
#
# Memory of a die, estimated: 36 GiB while it trains; 56 while it generates. Weights and optimizer wait in host memory.
# It works if the log has `rollout worker: drafter AscendAsyncSamProposer, verification exact`, and if
# `rollout/spec_accept_length` is above 1. Compare `timing_s/gen` with that of SPECULATION=off.
# A test composes it, and asks verl and vLLM; nobody has run it on NPUs yet. With DAPO, Megatron and preflight:
# scripts/run_dapo_qwen3_32b.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/ascend_environment.sh"

MODEL_PATH="${MODEL_PATH:-models/Qwen3-32B}"
DATA_DIR="${DATA_DIR:-data}"
drafts=('hydra.searchpath=[pkg://sam.configs]' "+speculation=${SPECULATION:-sam}")

exec python -m verl.trainer.main_ppo "${drafts[@]}" \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA_DIR/dapo_math_17k.parquet" data.val_files="$DATA_DIR/aime_2024.parquet" \
    data.train_batch_size=32 data.max_prompt_length=2048 data.max_response_length=20480 \
    actor_rollout_ref.model.path="$MODEL_PATH" \
    actor_rollout_ref.model.use_remove_padding=true actor_rollout_ref.model.enable_gradient_checkpointing=true \
    actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.actor.fsdp_config.strategy=fsdp2 \
    actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=4 \
    actor_rollout_ref.actor.fsdp_config.param_offload=true actor_rollout_ref.actor.fsdp_config.optimizer_offload=true \
    actor_rollout_ref.actor.use_torch_compile=false actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=9216 actor_rollout_ref.actor.use_kl_loss=false \
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.tensor_model_parallel_size=8 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.87 actor_rollout_ref.rollout.max_num_seqs=128 \
    actor_rollout_ref.rollout.enforce_eager=true actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.calculate_log_probs=true actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true \
    actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=9216 \
    trainer.use_v1=true trainer.device=npu trainer.n_gpus_per_node=16 trainer.nnodes=2 trainer.save_freq=10 \
    trainer.test_freq=10 trainer.total_training_steps=100 trainer.project_name=sam_examples \
    trainer.experiment_name=qwen3_32b_grpo 'trainer.logger=[console]' "$@"
