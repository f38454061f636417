#!/usr/bin/env bash
# One run of the recipe on the CPU:
#   bash scripts/run_dapo_tiny_cpu.sh [speculation=off|ngram|suffix|draft_model|hybrid] [overrides]
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
check_run dapo_tiny_cpu "$@"
extras=(cpu)
case " $* " in *" speculation=suffix "*) extras+=(peers) ;; esac
set_up_environment "${extras[@]}"
# Mistakes are found before anything is built.
python -m recipe.sam_dapo.main_dapo --config-name dapo_tiny_cpu --check "$@"
python -m recipe.sam_dapo.tiny.assets --output outputs/tiny_assets
case " $* " in
*" speculation=draft_model "* | *" speculation=hybrid "*) python -m recipe.sam_dapo.draft_model --assets outputs/tiny_assets ;;
esac
exec python -m recipe.sam_dapo.main_dapo --config-name dapo_tiny_cpu "$@"
