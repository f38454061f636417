"""Text of which half repeats, and a target that costs many layers."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipe.draft_model.measured_text import DEEP, REPEATED, deepened, main, repeated
from recipe.tiny.assets import AssetSettings, prepare_assets
from recipe.tiny.model import ModelSettings
from recipe.tiny.warm_start import WarmStartSettings
from sam.record.responses import read_recording


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    output = tmp_path_factory.mktemp("tiny") / "assets"
    settings = AssetSettings(
        train_rows=4,
        val_rows=4,
        model=ModelSettings(32, 32, num_hidden_layers=2, num_attention_heads=1, num_key_value_heads=1),
        warm_start=WarmStartSettings(steps=3, warmup_steps=1, tokens_per_step=1024),
    )
    prepare_assets(output, settings)
    return output


def test_a_deep_target_has_the_tokens_of_the_shallow_one(assets):
    target = AutoModelForCausalLM.from_pretrained(assets / "model").float()
    deep, ids = deepened(target, 7), torch.tensor([[1, 2, 3, 4, 5]])
    assert deep.config.num_hidden_layers == len(deep.model.layers) == 7 and len(target.model.layers) == 2
    assert torch.equal(deep(ids).logits, target(ids).logits)
    with pytest.raises(ValueError, match="layers=1: expected 2 or more"):
        deepened(target, 1)


def test_half_of_the_text_repeats(assets, tmp_path):
    command = ["--assets", str(assets), "--output", str(tmp_path), "--prompts", "2", "--layers", "3"]
    assert main(command) == 0
    recording = read_recording(tmp_path / REPEATED)
    assert [len(responses) for responses in recording.responses] == [8, 8]
    for response in (one.tolist() for its in recording.responses for one in its):
        assert response == repeated(response[: len(response) // 2])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / DEEP).config.num_hidden_layers == 3


@pytest.mark.parametrize(("change", "said"), [({"--assets": "none"}, "make model and data first"),
    ({"--prompts": "0"}, "--prompts 0"), ({"--layers": "1"}, "layers=1")])  # fmt: skip
def test_mistakes_are_one_line(assets, tmp_path, capsys, change, said):
    options = {"--assets": str(assets), "--output": str(tmp_path / "out")} | change
    assert main([word for pair in options.items() for word in pair]) == 2
    assert said in capsys.readouterr().err
