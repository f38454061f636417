#!/usr/bin/env bash
# Sourced on every node before Ray starts there: what HCCL, CANN, vllm-ascend and Ray read. A variable that is set
# already stays as it is. verl itself sets HCCL_HOST_SOCKET_PORT_RANGE and HCCL_NPU_SOCKET_PORT_RANGE to auto.
source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"

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

# Ray 2.60 asks for a token if it finds one, also an old one in ~/.ray on one node of many, which then keeps the others
# out, and `ray status` too. So for all nodes alike: a token where you set one, the same on every node, else none.
if [ -n "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" ]; then
    export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"
else
    export RAY_AUTH_MODE="${RAY_AUTH_MODE:-disabled}"
fi

# Less fragmentation in processes that live for a week.
for library in /usr/lib/*-linux-gnu/libjemalloc.so.2 /usr/lib64/libjemalloc.so.2; do
    [ -f "$library" ] && [ -z "${LD_PRELOAD:-}" ] && export LD_PRELOAD="$library"
done

# Hundreds of processes, each with sockets to many others. What the system does not allow stays as it is.
ulimit -n "$(ulimit -Hn)" 2>/dev/null || true

# On the head node, or alone: run_on_ascend CONFIG [overrides].
run_on_ascend() {
    local config="$1"
    shift
    check_run "$config" "$@"
    cd "$REPOSITORY"
    case " $* " in
        *" scale=smoke "*) unset RAY_ADDRESS RAY_AUTH_MODE ;; # on this machine's CPU, with a Ray of its own
        *) join_ray ;;
    esac
    exec python -m recipe.sam_dapo.main_dapo --config-name "$config" "$@"
}

# The cluster that `ray start` made this node join: its address stands in Ray's own file.
join_ray() {
    [ -z "${RAY_ADDRESS:-}" ] || return 0
    command -v ray >/dev/null && ray status >/dev/null 2>&1 || return 0
    RAY_ADDRESS="$(cat "${RAY_TMPDIR:-${TMPDIR:-/tmp}}/ray/ray_current_cluster" 2>/dev/null || true)"
    export RAY_ADDRESS="${RAY_ADDRESS:-auto}"
    echo "joining the Ray cluster that runs on this node, $RAY_ADDRESS"
}
