#!/usr/bin/env bash
# DAPO-Math-17k, AIME-2024 and GSM8K as verl reads them, below DATA_DIR (data): bash scripts/prepare_data.sh [NAMES]
# Without network: --from FOLDER takes the published files from there. A file that is there is not made again.
source "$(dirname "${BASH_SOURCE[0]}")/arguments.sh"
help_if_asked "$@"
cd "$REPOSITORY"
python="$(first_python)" || exit
exec "$python" -m sam.command_line data --output "${DATA_DIR:-data}" "$@"
