#!/usr/bin/env bash
# A server of vLLM's with drafts: bash examples/serve.sh [MODEL] [arguments of vllm serve]
# It works if the log has `speculation: drafter ..., policy goodput, verification exact`, and if
#   curl -s localhost:8000/metrics | grep spec_decode_num_accepted_tokens_total
# rises while it answers. The same settings for Python: examples/offline.py.
set -euo pipefail

drafter='{"model": "sam.SamProposer", "num_speculative_tokens": 8}'
if ! command -v nvidia-smi >/dev/null && ! command -v npu-smi >/dev/null; then
    export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}" # GiB, else vLLM takes half of a laptop's memory
fi
exec vllm serve "${1:-Qwen/Qwen3-0.6B}" --speculative-config "$drafter" "${@:2}"
