#!/usr/bin/env bash
# Does it pay on this GPU? bash scripts/bench_cuda.sh --model DIR --requests 1 4 16 64 [arguments of sam bench: docs/bench.md].
# Sets up .venv-cuda with the pins of requirements/cuda.txt.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
check_arguments sam.command_line bench --check "$@"
set_up_environment cuda
exec python -m sam.command_line bench "$@"
