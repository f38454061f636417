#!/usr/bin/env bash
# Sets everything up and passes the tests: the default suite, in two processes side by side.
#   fast       what to run while working: a minute, no engine, nothing is downloaded
#   --ascend   the tests of vllm-ascend on a simulated NPU, in an environment of their own
#   --v2       the tests of vLLM's second model runner on a CPU
#   --versions every vLLM from 0.23 on, one after the other, or those that are named: some three minutes each
#   --nodes    the tests of two nodes, made of this machine's namespaces: eight minutes, needs root
# Further arguments go to one pytest: bash scripts/test.sh tests/sam -k automaton
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
help_if_asked "$@"
case "${1:-}" in
    "" | fast | --ascend | --v2 | --versions | --nodes | -[a-zA-Z]* | --assert* | --[b-z]*) ;; # the last three are pytest's
    *) [ -e "${1%%::*}" ] || fail "$1: expected fast, --ascend, --v2, --versions, --nodes, or a file of tests and what else pytest takes" ;;
esac

# Two pytests at once, with the arguments before and after `--`; the second one's output is shown after the first's.
side_by_side() {
    local first=() output code=0 second
    while [ "$1" != -- ]; do first+=("$1") && shift; done
    shift
    output="$(mktemp)"
    python -m pytest "$@" >"$output" 2>&1 &
    second=$!
    trap 'kill $second; rm -f "$output"' EXIT
    python -m pytest "${first[@]}" || code=$?
    echo "beside it:"
    tail --pid=$second --lines=+1 --follow "$output"
    wait $second || code=$?
    trap - EXIT
    rm -f "$output"
    return $code
}

case "${1:-}" in
--ascend | --v2)
    folder="tests/${1#--}"
    if [ "$1" = --ascend ]; then
        set_up_ascend_simulator
    else
        set_up_environment cpu smollm2 dev
        export VLLM_USE_V2_MODEL_RUNNER=1 TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1
    fi
    shift
    [ $# -eq 0 ] || exec python -m pytest "$@"
    first=("$folder"/test_[de]*.py)
    side_by_side "${first[@]}" --durations=20 -- "$folder" "${first[@]/#/--ignore=}" --durations=20
    exit
    ;;
--versions)
    shift
    set_up_environment cpu smollm2 dev
    export TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1
    exec python -m tests.versions "$@"
    ;;
--nodes)
    shift
    set_up_environment cpu smollm2 dev
    [ $# -gt 0 ] || set -- tests/nodes --durations=20
    exec python -m pytest -m long "$@"
    ;;
fast)
    shift
    set_up_environment cpu smollm2 dev
    quick=(-m "not (engine or e2e or network or statistical or long)")
    # What composes dozens of configs or starts dozens of programs takes minutes.
    for slow in preflight tiny test_qwen3_configs.py test_scripts.py; do quick+=(--ignore "tests/recipe/sam_dapo/$slow"); done
    # Importing vLLM takes ten seconds: only tests of the second one do.
    needs_vllm=(tests/sam/vllm tests/sam/test_config.py tests/test_doctests.py tests/test_layers.py)
    first=(tests/sam tests/test_wheel.py "${needs_vllm[@]/#/--ignore=}" --ignore=tests/sam/engine)
    second=(tests/recipe "${needs_vllm[@]}")
    side_by_side "${quick[@]}" "${first[@]}" "$@" -- "${quick[@]}" "${second[@]}" "$@"
    exit
    ;;
esac
set_up_environment cpu smollm2 dev
ruff check .
ruff format --check .
[ $# -eq 0 ] || exec python -m pytest "$@"
# Those that start an engine take about as long as all others, whole runs among them, of which two never run at once.
side_by_side --durations=60 -m "engine and not (e2e or long)" -- --durations=60 -m "(e2e or not engine) and not long"
