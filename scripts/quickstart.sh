#!/usr/bin/env bash
# Sets everything up, trains the tiny model with speculation=sam and again with speculation=off (same seeds), times stock
# vLLM beside both on the same text, and writes outputs/quickstart/report.html. Arguments are Hydra overrides for both
# runs:
#   bash scripts/quickstart.sh trainer.total_training_steps=5
# An interrupted quickstart goes on from the last checkpoint; a finished one starts again and is kept once, as
# outputs/quickstart.previous. FRESH=1 starts again in any case.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
check_run dapo_tiny_cpu "$@"
set_up_environment cpu

# Mistakes are found before anything is built.
python -m recipe.sam_dapo.main_dapo --config-name dapo_tiny_cpu --check "$@"

OUTPUT="${QUICKSTART_OUTPUT:-outputs/quickstart}"
if [ -d "$OUTPUT" ] && { [ -n "${FRESH:-}" ] || [ -f "$OUTPUT/report.html" ]; }; then
    rm -rf "$OUTPUT.previous"
    mv "$OUTPUT" "$OUTPUT.previous"
fi

train() {
    local method="$1"
    shift
    echo "== training with speculation=$method: $OUTPUT/$method"
    python -m recipe.sam_dapo.main_dapo --config-name dapo_tiny_cpu \
        "speculation=$method" "run_dir=$OUTPUT/$method" "trainer.experiment_name=quickstart_$method" "$@"
}

# Beside the warm start, which leaves cores idle; the first engine would compile while everything waits for it.
python -c 'from sam.drafting.drafter import Drafter; from sam.switch.policies import warm_up; Drafter(max_draft_tokens=1).warm_up(); warm_up()' &
python -m recipe.sam_dapo.tiny.assets --output outputs/tiny_assets
wait
train sam "$@"
train off "$@"
# A report without stock vLLM is better than none; Ctrl-C ends all.
python -m sam.command_line bench --run "$OUTPUT/sam" --output "$OUTPUT" || [ $? -ne 130 ]
exec python -m sam.command_line report "$OUTPUT/sam" "$OUTPUT/off" --output "$OUTPUT"
