#!/usr/bin/env bash
# One Ray over all nodes, with the variables of scripts/ascend_environment.sh in every process:
#   bash scripts/start_ray_cluster.sh head                 on one node
#   bash scripts/start_ray_cluster.sh worker HEAD_ADDRESS  on every other
#   bash scripts/start_ray_cluster.sh stop                 on each, in the end
# DIES (16) and PORT (6379) may be set.
source "$(dirname "${BASH_SOURCE[0]}")/ascend_environment.sh"

usage() {
    echo "error: $1: expected head, worker HEAD_ADDRESS or stop" >&2
    exit 2
}

DIES="${DIES:-16}"
PORT="${PORT:-6379}"
RESOURCES="{\"NPU\": $DIES}"
case "${1:-}" in
    head)
        if ray status >/dev/null 2>&1; then
            echo "error: a Ray runs on this node already: stop it with bash scripts/start_ray_cluster.sh stop" >&2
            exit 2
        fi
        ray start --head --port "$PORT" --resources "$RESOURCES" --disable-usage-stats
        ;;
    worker)
        [ -n "${2:-}" ] || usage "worker needs the head's address"
        ray start --address "$2:$PORT" --resources "$RESOURCES" --disable-usage-stats
        ;;
    stop) ray stop ;;
    *) usage "${1:-nothing}" ;;
esac
