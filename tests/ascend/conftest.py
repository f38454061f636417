"""These tests need their own environment: bash scripts/test.sh --ascend. They run in it on a simulated NPU."""

import importlib.util
import os

import pytest

if importlib.util.find_spec("vllm_ascend") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.update(
        VLLM_WORKER_MULTIPROC_METHOD="fork", VLLM_NO_USAGE_STATS="1", GLOO_SOCKET_IFNAME="lo", HF_HUB_OFFLINE="1"
    )
    from tests.ascend import simulator

    simulator.install()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """A model whose text repeats."""
    from tests.sam.engine import matrix

    return matrix.save(tmp_path_factory.mktemp("model"))
