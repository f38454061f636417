#!/usr/bin/env bash
# A model's files below MODELS_DIR (models), which all nodes should see: bash scripts/prepare_model.sh NAME [NAME ...]
# NAME: Qwen3-8B, Qwen3-32B, Qwen3-235B-A22B, or OWNER/NAME. HUB says where from: huggingface (the default), modelscope,
# or none, which only checks what is there. A download that was interrupted goes on where it stopped. CHECKSUMS=1 reads
# every byte again and compares it with the hub's SHA-256.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=python
[ -x .venv/bin/python ] && PYTHON=.venv/bin/python
export PATH="$PATH:$PWD/.venv/bin"

fail() {
    echo "error: $*" >&2
    exit 2
}

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
        *) fail "HUB=$HUB: expected huggingface, modelscope or none" ;;
    esac || fail "$repository was not fetched to the end: run this again, it goes on where it stopped; without" \
        "network copy the folder to $folder and check it with HUB=none bash scripts/prepare_model.sh $repository"
}

[ $# -gt 0 ] || fail "no model named: expected Qwen3-8B, Qwen3-32B, Qwen3-235B-A22B, or OWNER/NAME"
for name in "$@"; do
    case "$name" in
        */*) repository="$name" ;;
        Qwen3-*) repository="Qwen/$name" ;;
        *) fail "$name: expected Qwen3-8B, Qwen3-32B, Qwen3-235B-A22B, or OWNER/NAME" ;;
    esac
    folder="${MODELS_DIR:-models}/${repository##*/}"
    fetch "$repository" "$folder"
    "$PYTHON" -m recipe.preflight.weights "$folder" ${CHECKSUMS:+--checksums}
done
