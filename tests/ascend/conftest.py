"""These tests need their own environment: bash scripts/test.sh --ascend."""

import importlib.util

if importlib.util.find_spec("vllm_ascend") is None:
    collect_ignore_glob = ["test_*.py"]
