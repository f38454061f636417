import pytest

from tests.recipe.sam_dapo.preflight.preflight_node import Node, write_model, write_rows


@pytest.fixture
def assets(tmp_path):
    """The files that a config reads."""
    write_rows(tmp_path / "train.parquet")
    write_rows(tmp_path / "val.parquet")
    write_model(tmp_path / "model")
    return tmp_path


@pytest.fixture
def node(assets, monkeypatch):
    return Node(assets, monkeypatch)
