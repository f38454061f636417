#!/usr/bin/env bash
# One run of the recipe on the CPU:
#   bash scripts/run_dapo_tiny_cpu.sh [--verbose] [speculation=off|ngram|suffix] [overrides]
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
extras=(cpu)
case " $* " in *" speculation=suffix "*) extras+=(peers) ;; esac
set_up_environment "${extras[@]}"
# Mistakes are found before anything is built.
python -m recipe.main_dapo --config-name dapo_tiny_cpu --check "$@"
python -m recipe.tiny.assets --output outputs/tiny_assets
exec python -m recipe.main_dapo --config-name dapo_tiny_cpu "$@"
