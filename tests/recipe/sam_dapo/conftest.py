"""Hundreds of these tests compose a config: the same choice, and the YAML files that all share, are read once."""

import copy
import functools
import io
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe.sam_dapo.launch import config


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
