import pytest

from tests.recipe.preflight.preflight_node import good_node, write_model, write_rows


@pytest.fixture
def assets(tmp_path):
    """What the checks of a config for a CPU look at."""
    write_rows(tmp_path / "train.parquet")
    write_rows(tmp_path / "val.parquet")
    write_model(tmp_path / "model")
    return tmp_path


@pytest.fixture
def node(tmp_path, monkeypatch):
    return good_node(tmp_path, monkeypatch)
