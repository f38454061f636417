#!/usr/bin/env bash
# Qwen3-32B on 8 nodes of 16 dies: bash scripts/run_dapo_qwen3_32b_128die.sh [speculation=off] [overrides].
# On the head node of a cluster started with scripts/start_ray_cluster.sh; with scale=smoke on any machine.
# MODEL_PATH and DATA_DIR may be set.
source "$(dirname "${BASH_SOURCE[0]}")/ascend_environment.sh"
run_on_ascend dapo_qwen3_32b_128die "$@"
