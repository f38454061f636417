#!/usr/bin/env bash
# Sets everything up and passes the tests. Arguments go to pytest: bash scripts/test.sh tests/sam -k automaton
# With --ascend first: the tests of vllm-ascend on a simulated NPU, in an environment of their own.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
if [ "${1:-}" = --ascend ]; then
    shift
    set_up_ascend_simulator
    [ $# -gt 0 ] || set -- tests/ascend
    exec python -m pytest "$@"
fi
set_up_environment cpu dev
ruff check .
ruff format --check .
exec python -m pytest "$@"
