#!/usr/bin/env bash
# A model's files below MODELS_DIR (models), which all nodes should see: bash scripts/prepare_model.sh NAME [NAME ...]
# NAME: Qwen3-8B, Qwen3-32B, Qwen3-235B-A22B, or OWNER/NAME. HUB says where from: huggingface (the default), modelscope,
# or none, which only checks what is there. A download that was interrupted goes on where it stopped.
source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"
help_if_asked "$@"
cd "$REPOSITORY"

# The settings of a run, which never looks for a network, do not hold for this.
unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE

fetch() {
    local repository="$1" folder="$2"
    case "${HUB:-huggingface}" in
        huggingface)
            command -v hf >/dev/null || fail "hf is not installed: pip install huggingface_hub, or set HUB=modelscope"
            hf download "$repository" --local-dir "$folder"
            ;;
        modelscope)
            command -v modelscope >/dev/null || fail "modelscope is not installed: pip install modelscope"
            modelscope download --model "$repository" --local_dir "$folder"
            ;;
        none) ;;
    esac || fail "$repository was not fetched to the end: run this again, it goes on where it stopped; without" \
        "network copy the folder to $folder and check it with HUB=none bash scripts/prepare_model.sh $repository"
}

[ $# -gt 0 ] || fail "no model named: expected Qwen3-8B, Qwen3-32B, Qwen3-235B-A22B, or OWNER/NAME"
case "${HUB:-huggingface}" in huggingface | modelscope | none) ;; *) fail "HUB=$HUB: expected huggingface, modelscope or none" ;; esac
for name in "$@"; do
    case "$name" in Qwen3-8B | Qwen3-32B | Qwen3-235B-A22B) ;; -*) false ;; *?/?*) ;; *) false ;; esac ||
        fail "$name: expected Qwen3-8B, Qwen3-32B, Qwen3-235B-A22B, or OWNER/NAME"
done
python="$(first_python)" || exit
export PATH="$PATH:$(dirname "$python")"
for name in "$@"; do
    case "$name" in */*) repository="$name" ;; *) repository="Qwen/$name" ;; esac
    folder="${MODELS_DIR:-models}/${repository##*/}"
    fetch "$repository" "$folder"
    "$python" -m recipe.sam_dapo.preflight --weights "$folder"
done
