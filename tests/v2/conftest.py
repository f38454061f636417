"""These tests run with vLLM's second model runner: bash scripts/test.sh --v2."""

import os

import pytest

if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    from tests.v2 import second_on_cpu

    second_on_cpu.install()
else:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A model whose text repeats, with a tokenizer of one word a token."""
    from tests.sam.engine import matrix

    return matrix.save(tmp_path_factory.mktemp("model"))
