#!/usr/bin/env bash
# Sets everything up and passes the tests: the default suite, in two processes side by side.
#   fast       what to run while working: about a minute, no engine, nothing is downloaded
#   --ascend   the tests of vllm-ascend on a simulated NPU, in an environment of their own
# Further arguments go to one pytest: bash scripts/test.sh tests/sam -k automaton
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

# A run waits for one of its processes most of the time: beside these tests run all others.
run_default_suite() {
    local output code=0 beside
    output="$(mktemp)"
    set -m # a process group of its own, so that an interrupt reaches what its tests have started
    python -m pytest --durations=20 -m "e2e and not long" >"$output" 2>&1 &
    beside=$!
    set +m
    trap 'kill -INT -- -$beside; wait $beside; rm -f "$output"' EXIT
    python -m pytest --durations=20 -m "not e2e and not long" || code=$?
    echo "with processes of a run:"
    tail --pid=$beside --lines=+1 --follow "$output"
    wait $beside || code=$?
    trap 'rm -f "$output"' EXIT
    return $code
}

case "${1:-}" in
--ascend)
    shift
    set_up_ascend_simulator
    [ $# -gt 0 ] || set -- tests/ascend --durations=20
    exec python -m pytest "$@"
    ;;
fast)
    shift
    set_up_environment cpu dev
    exec python -m pytest -m "not (engine or e2e or network or statistical or long)" "$@"
    ;;
esac
set_up_environment cpu dev
ruff check .
ruff format --check .
[ $# -eq 0 ] || exec python -m pytest "$@"
run_default_suite
