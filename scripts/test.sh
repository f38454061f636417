#!/usr/bin/env bash
# Sets everything up and passes the tests. Arguments go to pytest: bash scripts/test.sh tests/unit -k automaton
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
set_up_environment cpu dev
ruff check .
ruff format --check .
exec python -m pytest "$@"
