import pytest
from transformers import AutoModelForCausalLM

from sam_recipe.tiny.assets import AssetSettings, prepare_assets
from sam_recipe.tiny.model import ModelSettings
from sam_recipe.tiny.warm_start import WarmStartSettings


@pytest.fixture(scope="package")
def assets(tmp_path_factory):
    output = tmp_path_factory.mktemp("tiny") / "assets"
    settings = AssetSettings(
        train_rows=20,
        val_rows=4,
        model=ModelSettings(32, 32, num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1),
        warm_start=WarmStartSettings(steps=3, warmup_steps=1, tokens_per_step=1024),
    )
    prepare_assets(output, settings)
    return output


@pytest.fixture(scope="package")
def target(assets):
    return AutoModelForCausalLM.from_pretrained(assets / "model").float()
