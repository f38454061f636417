#!/usr/bin/env bash
# A server of vLLM's with drafts: bash examples/serve.sh [MODEL] [arguments of vllm serve]
# It works if the log has `speculation: drafter ..., policy goodput, verification exact`, and if
#   curl -s localhost:8000/metrics | grep spec_decode_num_accepted_tokens_total
# rises while it answers. The same settings for Python: examples/offline.py.
set -euo pipefail

# The exact sampler replaces that of vLLM's first model runner.
export VLLM_USE_V2_MODEL_RUNNER=0
if command -v nvidia-smi >/dev/null || command -v npu-smi >/dev/null; then
    # By this name vLLM goes on to schedule steps ahead, and this project's drafter takes its place.
    drafter='{"method": "ngram_gpu", "num_speculative_tokens": 8}'
else
    drafter='{"model": "sam.SamProposer", "num_speculative_tokens": 8}'
    export VLLM_CPU_KVCACHE_SPACE="${VLLM_CPU_KVCACHE_SPACE:-1}" # GiB, else vLLM takes half of a laptop's memory
fi
exec vllm serve "${1:-Qwen/Qwen3-0.6B}" --speculative-config "$drafter" --additional-config '{"speculation": {}}' "${@:2}"
