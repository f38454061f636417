#!/usr/bin/env bash
# One Ray over all nodes, with the variables of scripts/ascend_environment.sh in every process:
#   bash scripts/start_ray_cluster.sh head                 on one node
#   bash scripts/start_ray_cluster.sh worker HEAD_ADDRESS  on every other
#   bash scripts/start_ray_cluster.sh stop                 on each, in the end
# DIES (16) and PORT (6379) may be set.
source "$(dirname "${BASH_SOURCE[0]}")/ascend_environment.sh"

usage="expected head, worker HEAD_ADDRESS or stop"
help_if_asked "$@"
case "$#:${1:-nothing}" in
    1:head | 1:stop | 2:worker) ;;
    1:worker) fail "worker needs the head's address: $usage" ;;
    *:head | *:stop | *:worker) fail "$*: $usage" ;;
    *) fail "${1:-nothing}: $usage" ;;
esac

answers() { timeout 5 bash -c "exec 3<>/dev/tcp/$1/$2" 2>/dev/null; }

refuse_second_ray() {
    ! ray status >/dev/null 2>&1 ||
        fail "a Ray runs on this node already: stop it with bash scripts/start_ray_cluster.sh stop"
}

DIES="${DIES:-16}"
PORT="${PORT:-6379}"
RESOURCES="{\"NPU\": $DIES}"
command -v ray >/dev/null ||
    fail "ray is not on PATH: activate the environment that requirements/ascend.txt is installed in"
case "${1:-}" in
    head)
        refuse_second_ray
        ! answers 127.0.0.1 "$PORT" ||
            fail "port $PORT is taken by another program on this node: stop it, or set PORT to a free one on all nodes"
        ray start --head --port "$PORT" --resources "$RESOURCES" --disable-usage-stats
        ;;
    worker)
        refuse_second_ray
        answers "$2" "$PORT" ||
            fail "no Ray answers at $2:$PORT: run bash scripts/start_ray_cluster.sh head there first, with this PORT"
        ray start --address "$2:$PORT" --resources "$RESOURCES" --disable-usage-stats
        ;;
    stop) ray stop ;;
esac
