#!/usr/bin/env bash
# For a machine without a network: bash scripts/download_packages.sh FOLDER EXTRA... (cpu, smollm2, cuda, dev) on one of the same
# system and Python (3.11 or 3.12). Carry FOLDER with this repository, and set PACKAGES=FOLDER there for every script that sets up.
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
help_if_asked "$@"
[ $# -ge 2 ] || fail "expected a folder and extras: bash scripts/download_packages.sh packages cuda"
folder="$(realpath -m "$1")"
cd "$REPOSITORY"
files=()
for extra in uv "${@:2}"; do
    [ -f "requirements/$extra.txt" ] || fail "$extra: expected some of cpu, smollm2, cuda, dev"
    files+=(-r "requirements/$extra.txt")
done
python="$(find_python)" || exit
"$python" -m pip download --require-hashes --no-deps --dest "$folder" "${files[@]}"
echo "carry $folder with this repository; there: PACKAGES=FOLDER bash scripts/..."
