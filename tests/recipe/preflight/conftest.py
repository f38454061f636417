"""What the checks of a config look at."""

import pytest

from tests.recipe.preflight.preflight_node import write_model, write_rows


@pytest.fixture
def assets(tmp_path):
    write_rows(tmp_path / "train.parquet")
    write_rows(tmp_path / "val.parquet")
    write_model(tmp_path / "model")
    return tmp_path
