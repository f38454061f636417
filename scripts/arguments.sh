#!/usr/bin/env bash
# Sourced by the other scripts: help and typing mistakes are answered before anything is installed or started.
set -euo pipefail

REPOSITORY="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

fail() {
    echo "error: $*" >&2
    exit 2
}

asks_for_help() {
    case " $* " in *" --help "* | *" -h "*) ;; *) return 1 ;; esac
}

# `help_if_asked ARGUMENTS...`: the comment at a script's head is its help.
help_if_asked() {
    asks_for_help "$@" || return 0
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit 0
}

# A Python of the versions that the pins are for: `PYTHON` alone where it is set.
find_python() {
    local candidate candidates=(python3.11 python3.12 python3)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "${PYTHON:+PYTHON=$PYTHON: }no Python 3.11 or 3.12 found: install it or set PYTHON=/path/to/python3.12"
}

# `check_arguments MODULE ARGUMENTS...`: ends the script where the command's own words are wrong, or ask for help. The module
# needs Python's standard library only.
check_arguments() {
    local python
    python="$(find_python)" || exit
    if asks_for_help "$@"; then sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0" && echo; fi
    PYTHONPATH="$REPOSITORY" "$python" -m "$@" || exit
    if asks_for_help "$@"; then exit 0; fi
}

# `check_run CONFIG ARGUMENTS...`: those of a run.
check_run() { check_arguments recipe.sam_dapo.arguments --config-name "$@"; }

# For scripts that work in whichever environment there is: the first of the scripts' own, or the one that is active.
first_python() {
    local candidate
    for candidate in "$REPOSITORY"/.venv/bin/python "$REPOSITORY"/.venv-cuda/bin/python; do
        if [ -x "$candidate" ]; then echo "$candidate" && return; fi
    done
    command -v python || find_python
}
