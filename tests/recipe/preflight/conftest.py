import shutil

import pytest

from tests.recipe.preflight.preflight_node import good_node, write_files, write_model, write_rows


@pytest.fixture
def assets(tmp_path):
    """What the checks of a config for a CPU look at."""
    write_rows(tmp_path / "train.parquet")
    write_rows(tmp_path / "val.parquet")
    write_model(tmp_path / "model")
    return tmp_path


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """Of a good node; written once, they are copied for each test."""
    write_files(folder := tmp_path_factory.mktemp("node"))
    return folder


@pytest.fixture
def node(files, tmp_path, monkeypatch):
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    return good_node(tmp_path, monkeypatch)
