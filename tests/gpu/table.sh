#!/usr/bin/env bash
# On the GPU machine, in the project's folder: bash tests/gpu/table.sh MODEL SECONDS [options of sam bench or vLLM's]
# MODEL: tiny (two layers), 0.6b, 1.7b, 4b, 8b or 32b: Qwen3's shapes with random weights, whose requests emit recorded
# text. Ends within SECONDS; the same command goes on where it ended, while /tmp is kept. Leaves in $OUT/NAME:
# result.json, and rest.tar.xz with rounds, logs and nvidia-smi.
# Variables: VARIANTS="stock off sam sam-device", REQUESTS="1 4 16 64 256", RECORDING=FILE.npz, SAMPLES=8,
# MAX_TOKENS=192, RESPONSES=8, ROUNDS=3, RUNNER=v1 (vLLM's first model runner: a table of its own, without sam-device),
# NAME, BEFORE=FOLDER (its rounds.jsonl is gone on with, on another machine with a GPU of the same kind).
set -euo pipefail
model="${1:?usage: bash table.sh MODEL SECONDS [options]}" seconds="${2:?usage: bash table.sh MODEL SECONDS [options]}"
shift 2
site="${KIT_SITE:-/tmp/site}" work="${KIT_WORK:-/tmp/kit_work}" out="${OUT:-outputs/kit}"
[ -d sam/tools/bench ] || { echo "error: no sam/tools/bench here: run it in the project's folder" >&2; exit 2; }
[ -d "$site" ] || { echo "error: no $site: run unpack.py first" >&2; exit 2; }
mkdir -p "$work" "$out"
out="$(realpath "$out")"
name="${NAME:-$model${RUNNER:+-$RUNNER}}"
output="$work/bench/$name"

recording="${RECORDING:-math_group_n16}"
if [ ! -f "$recording" ]; then
    for folder in ../shared/traces shared/traces; do
        [ ! -f "$folder/$recording.npz" ] || { recording="$folder/$recording.npz"; break; }
    done
fi
[ -f "$recording" ] || { echo "error: no recording $recording: set RECORDING=FILE.npz" >&2; exit 2; }

export PYTHONPATH="$site:$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
# FlashInfer is not carried; all sides sample without it.
export VLLM_USE_FLASHINFER_SAMPLER=0
# What is compiled once stays for the next call.
export VLLM_CACHE_ROOT="$work/vllm" TRITON_CACHE_DIR="$work/triton"
export TORCHINDUCTOR_CACHE_DIR="$work/inductor" NUMBA_CACHE_DIR="$work/numba"
case "${RUNNER:-}" in
    "") variants="${VARIANTS:-stock off sam sam-device}" ;;
    v1) variants="${VARIANTS:-stock off sam}"; export VLLM_USE_V2_MODEL_RUNNER=0 ;;
    *) echo "error: RUNNER=$RUNNER: expected v1, or nothing" >&2; exit 2 ;;
esac

# The model's folder, and what one engine gets of the memory: all but a tenth, in equal parts.
memory_mib="$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | head -1 || true)"
shapes="$(dirname "${BASH_SOURCE[0]}")/shapes.py"
settings="$(python3 "$shapes" "$model" "$work/models/$model" "${memory_mib:-0}" $variants)" || exit 2
eval "$settings"

mkdir -p "$output" "$out/$name"
if [ -n "${BEFORE:-}" ] && [ ! -s "$output/rounds.jsonl" ]; then cp "$BEFORE/rounds.jsonl" "$output/"; fi
memory_options=()
# On a CPU VLLM_CPU_KVCACHE_SPACE says it.
if [ -n "$memory_mib" ]; then memory_options=(--gpu-memory-utilization "$share"); fi
smi=
if [ -n "$memory_mib" ]; then
    nvidia-smi >>"$output/nvidia-smi.txt"
    columns=timestamp,name,utilization.gpu,memory.used,clocks.sm,clocks.mem,power.draw,temperature.gpu
    nvidia-smi --query-gpu="$columns" --format=csv -l 5 >>"$output/nvidia-smi.csv" &
    smi=$!
fi

# A shell's background jobs ignore Ctrl-C, which is what ends a table here: undone first. --foreground: it comes once.
within='import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execvp(sys.argv[1], sys.argv[1:])'
ending=45 # seconds in which engines end
code=0
set -x
python3 -c "$within" timeout --foreground --signal=INT --kill-after="$ending" "$((seconds - ending))" \
    python3 -m sam.tools.bench --model "$work/models/$model" --text "$recording" --variants $variants \
    --requests ${REQUESTS:-$fitting} --samples "${SAMPLES:-8}" --max-tokens "${MAX_TOKENS:-192}" \
    --responses "${RESPONSES:-8}" --rounds "${ROUNDS:-3}" --temperature 1.0 \
    --output "$output" --resume --load-format dummy --dtype bfloat16 --max-model-len 2048 "${memory_options[@]}" "$@" \
    2>&1 | tee "$output/table.txt" || code=$?
set +x
if [ -n "$smi" ]; then kill "$smi" 2>/dev/null || true; fi
[ ! -f "$output/result.json" ] || cp "$output/result.json" "$out/$name/"
tar -C "$work/bench" -cJf "$out/$name/rest.tar.xz" "$name"
if [ "$code" -ne 0 ]; then
    for log in "$output"/*.log; do [ ! -f "$log" ] || { echo "== $log"; tail -n 15 "$log"; }; done
    [ "$code" -ne 124 ] || echo "time is up: the same command again goes on"
fi
exit "$code"
