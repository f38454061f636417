from dataclasses import replace

import pytest

from sam_recipe.tiny.assets import AssetSettings, prepare_assets
from sam_recipe.tiny.warm_start import WarmStartSettings


@pytest.fixture(scope="session")
def assets(tmp_path_factory):
    """A model that has learnt next to nothing: every group trains, whatever its answers, where none is filtered out."""
    folder = tmp_path_factory.mktemp("tiny") / "assets"
    prepare_assets(folder, AssetSettings(train_rows=64, val_rows=4, warm_start=replace(WarmStartSettings(), steps=40)))
    return folder
