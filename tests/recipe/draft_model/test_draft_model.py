"""A draft model or an EAGLE3 head distilled from a tiny target: learnt, built once, and what it computes."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sam_recipe.draft_model import distil
from sam_recipe.draft_model.__main__ import KINDS, class_of, main
from sam_recipe.draft_model.distil import Settings, Student, acceptance, sample_responses, states_of, train
from sam_recipe.draft_model.eagle3 import Head, layers_read
from sam_recipe.tiny.assets import AssetSettings, prepare_assets
from sam_recipe.tiny.model import ModelSettings
from sam_recipe.tiny.warm_start import WarmStartSettings
from tests.sam.engine.trained_models import ReferenceHead

SMALL = Settings(6, samples=2, response_tokens=12, steps=60, sequences=6, learning_rate=1e-2, threads=1, unroll=3)
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


@pytest.fixture(scope="module")
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


@pytest.fixture(scope="module")
def target(assets):
    return AutoModelForCausalLM.from_pretrained(assets / "model").float()


@pytest.mark.parametrize("kind", [class_of(kind) for kind in KINDS], ids=KINDS)
def test_it_learns_the_targets_distribution(kind, target):
    examples, drafter = sample_responses(target, PROMPTS, SMALL), kind(target, SMALL)
    assert [prompt for prompt, _ in examples] == [prompt for prompt in PROMPTS for _ in range(2)]
    losses = train(target, drafter, examples, SMALL)
    assert sum(losses[-5:]) < sum(losses[:5])
    before, after = (acceptance(target, one, examples) for one in (kind(target, SMALL), drafter))
    assert len(after) == distil.POSITIONS
    # A copy of the target's layers is right now and then before it has learnt anything.
    assert kind is Student or sum(after[:3]) > sum(before[:3])


def test_acceptance_by_position_is_counted_from_every_token(target):
    """Right at tokens 2 and 3 of a response of four, whatever the position."""

    class Drafter:
        layers_read = ()

        def __call__(self, ids, _states, passes):
            right = torch.tensor([[False, False, True, True, False]])  # by the token after which one is drafted
            tokens = torch.zeros_like(ids)
            tokens[:, :-1] = torch.where(right, ids[:, 1:], 0)
            return [tokens] * passes

        def lm_head(self, tokens):
            return torch.nn.functional.one_hot(tokens, 20)

    found = acceptance(target, Drafter(), [([9, 9], [1, 2, 3, 4])])
    # Four drafts of a first token, two accepted; both have a second, one accepted; that one's third is wrong.
    assert found[:4] == [0.5, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(("kind", "name"), [("draft_model", "draft model"), ("eagle3", "EAGLE3 head")])
def test_it_is_built_once_and_its_acceptance_is_said_again(assets, capsys, kind, name):
    words, folder = ["--assets", str(assets), "--kind", kind, "--prompts", "2", "--steps", "1"], class_of(kind).folder
    said = []
    for _ in range(2):
        assert main(words) == 0
        said.append(capsys.readouterr().out)
    assert said[0].startswith(f"{name} built in {assets / folder}: of 4 held-out responses")
    assert said[0].count("%") == distil.POSITIONS and said[1] == said[0].replace("built", "found")
    assert (assets / folder / "tokenizer_config.json").is_file()
    assert kind == "eagle3" or AutoModelForCausalLM.from_pretrained(assets / folder).config.num_hidden_layers == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kind", "eagle3", "--layers", "2"], "--layers is 2: unused with --kind eagle3"),
        (["--layers", "0"], "--layers is 0: expected at least 1"),
        (["--prompts", "1"], "--prompts is 1: expected at least 2"),
        (["--kind", "medusa"], "invalid choice: 'medusa'"),
        ([], "config.json: make model and data first"),
    ],
)
def test_words_that_make_no_sense_or_no_target(tmp_path, capsys, words, said):
    try:
        code = main(["--assets", str(tmp_path), *words])
    except SystemExit as ended:
        code = ended.code
    error = capsys.readouterr().err
    assert code == 2 and said in error


def test_unrolled_steps_are_the_drafts_of_the_saved_head(target, tmp_path):
    """Training computes what a head drafts from every token at once; the reference drafts from one text."""
    head = Head(target, Settings(seed=3))
    head.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert "embed_tokens.weight" not in weights and {"fc.weight", "midlayer.self_attn.q_proj.weight"} < weights.keys()
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    reference = ReferenceHead(SimpleNamespace(network=target), tmp_path)
    with torch.no_grad():
        for begin in (3, 6, 9):
            text = torch.randint(20, (begin,)).tolist()
            draft = reference.draft(text, 3)
            ids = torch.tensor([text + draft])
            passes = head(ids, states_of(target, head.layers_read, ids), 3)
            found = [head.lm_head(states[0, begin - 1 + pass_]).argmax() for pass_, states in enumerate(passes)]
            assert found == draft


def test_layers_that_are_read_or_that_the_target_lacks(target):
    for layers in (0, 3):
        with pytest.raises(ValueError, match=f"layers={layers}: expected 1 to 2"):
            Student(target, replace(SMALL, layers=layers))
    assert [layers_read(count) for count in (1, 2, 4, 6, 36)] == [[0, 1], [0, 1, 2], [0, 2, 4], [0, 3, 6], [2, 18, 33]]
