"""Hundreds of these tests compose a config: the same choice, and the YAML files that all share, are read once.

And a Ray of their own, for those that need a real one.
"""

import copy
import functools
import io
import shutil
import tempfile
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from sam_recipe.launch import config


@pytest.fixture(scope="session", autouse=True)
def nothing_is_composed_twice():
    """Variables of the environment, the recipe's own keys and all checks come after, each time."""
    parsed = functools.cache(lambda text, load=OmegaConf.load: load(io.StringIO(text)))
    composed = functools.cache(lambda _, name, overrides, compose=config.compose: compose(name, list(overrides)))

    def load(file):
        return copy.deepcopy(parsed(file.read() if hasattr(file, "read") else Path(file).read_text()))

    def compose(name, overrides):
        return copy.deepcopy(composed(config.CONFIGS, name, tuple(overrides)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", staticmethod(load))
        patch.setattr(config, "compose", compose)
        yield


@pytest.fixture(scope="module")
def cluster():
    """A head with 16 dies that are none."""
    import ray

    folder = tempfile.mkdtemp(prefix="ray-")  # short: Ray's sockets lie below
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # or Ray leaves a token in HOME
        ray.init(
            num_cpus=1, resources={"NPU": 16}, include_dashboard=False, log_to_driver=False, _temp_dir=folder,
            object_store_memory=100 << 20, runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parents[2])}},
        )  # fmt: skip
        yield
        ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
