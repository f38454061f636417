#!/usr/bin/env bash
# Sourced on every node before Ray starts there: what HCCL, CANN, vllm-ascend and Ray read. A variable that is set already
# stays as it is. verl itself sets HCCL_HOST_SOCKET_PORT_RANGE and HCCL_NPU_SOCKET_PORT_RANGE to auto.
set -euo pipefail

# verl hands dies to its workers itself; Ray must not hide them.
export RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES="${RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES:-1}"
# Seconds that ranks wait for each other when a communicator is made: loading 235B parameters takes minutes.
export HCCL_CONNECT_TIMEOUT="${HCCL_CONNECT_TIMEOUT:-1800}"
# Seconds that one collective may take: ranks whose rollout has ended wait for the longest response.
export HCCL_EXEC_TIMEOUT="${HCCL_EXEC_TIMEOUT:-7200}"
# Collectives are laid out on the AI vector cores, with less work for the host at every call.
export HCCL_OP_EXPANSION_MODE="${HCCL_OP_EXPANSION_MODE:-AIV}"
# Operators are queued by a second thread. 2 would overlap more, and conflicts with graphs.
export TASK_QUEUE_ENABLE="${TASK_QUEUE_ENABLE:-1}"
# Weights stay in the layout that a weight sync can write.
export VLLM_ASCEND_ENABLE_NZ="${VLLM_ASCEND_ENABLE_NZ:-0}"
# Threads stay on the cores near their die.
export CPU_AFFINITY_CONF="${CPU_AFFINITY_CONF:-1}"

# Less fragmentation in processes that live for a week.
for library in /usr/lib/*-linux-gnu/libjemalloc.so.2 /usr/lib64/libjemalloc.so.2; do
    [ -f "$library" ] && [ -z "${LD_PRELOAD:-}" ] && export LD_PRELOAD="$library"
done

# On the head node, or alone: run_on_ascend CONFIG [overrides].
run_on_ascend() {
    local config="$1"
    shift
    cd "$(dirname "${BASH_SOURCE[0]}")/.."
    if [ -z "${RAY_ADDRESS:-}" ] && command -v ray >/dev/null && ray status >/dev/null 2>&1; then
        export RAY_ADDRESS=auto
        echo "joining the Ray cluster that runs on this node"
    fi
    exec python -m recipe.main_dapo --config-name "$config" "$@"
}
