#!/usr/bin/env bash
# DAPO-Math-17k, AIME-2024 and GSM8K as verl reads them, below DATA_DIR (data): bash scripts/prepare_data.sh [NAMES]
# Without network: --from FOLDER takes the published files from there. What is there and complete is not made again.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON=python
[ -x .venv/bin/python ] && PYTHON=.venv/bin/python
exec "$PYTHON" -m recipe.data --output "${DATA_DIR:-data}" "$@"
