#!/usr/bin/env bash
# Qwen3-8B on one node of 8 GPUs: bash scripts/run_dapo_qwen3_8b_cuda.sh [speculation=off] [overrides].
# MODEL_PATH and DATA_DIR may be set. Sets up .venv-cuda with the pins of requirements/cuda.txt.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
check_run dapo_qwen3_8b_cuda "$@"
set_up_environment cuda
exec python -m recipe.sam_dapo.main_dapo --config-name dapo_qwen3_8b_cuda "$@"
