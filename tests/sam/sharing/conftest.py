"""A Ray cluster of this machine, and a shard in it, for the tests that start real ones."""

import shutil
import tempfile

import pytest

from sam.sharing.shard import start_shards
from tests.sam.sharing.engines import ROOT


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    folder = tempfile.mkdtemp(prefix="ray-")  # short: Ray's sockets lie below
    ray.init(
        num_cpus=1,
        include_dashboard=False,
        configure_logging=False,
        object_store_memory=100 << 20,
        _temp_dir=folder,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def shards(cluster, request):
    """One shard of a run of its own: where it is, and its handle."""
    where, handles = start_shards(1, request.node.name, 1 << 24)
    yield where, handles[0]
    import ray

    ray.kill(handles[0])
