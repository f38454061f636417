"""An EAGLE3 head trained on a tiny target's responses: what it computes, learns, reports and is saved as."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from recipe.draft_model import acceptance
from recipe.draft_model.__main__ import KINDS, main, prepare_drafter
from recipe.draft_model.distil import STATE, sample_responses
from recipe.draft_model.eagle3 import Head, HeadSettings, layers_read, train_head, unrolled
from tests.recipe.draft_model.test_draft_model import PROMPTS
from tests.sam.engine.eagle_head import ReferenceHead

SMALL = HeadSettings(prompts=6, samples=2, response_tokens=12, steps=12, sequences=4, save_steps=5, threads=1, unroll=3)


@pytest.fixture(scope="module")
def examples(target, tmp_path_factory):
    return sample_responses(target, PROMPTS, SMALL, tmp_path_factory.mktemp("responses"))


def save(target, head, folder):
    """As the engine's tests read it."""
    head.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    return ReferenceHead(SimpleNamespace(network=target), folder), weights


def test_unrolled_steps_are_the_drafts_of_the_saved_head(target, examples, tmp_path):
    """Training computes what a head drafts from every token at once; the reference drafts from one text."""
    torch.manual_seed(3)
    head = Head(target)
    reference, weights = save(target, head, tmp_path)
    assert "embed_tokens.weight" not in weights and {"fc.weight", "midlayer.self_attn.q_proj.weight"} < weights.keys()
    text, begins = sum(examples[0], []), (3, 6, 9)
    with torch.no_grad():
        for begin in begins:
            draft = reference.draft(text[:begin], 3)
            ids = torch.tensor([text[:begin] + draft])
            passes, _ = unrolled(target, head, ids, 3)
            # The entry before the last token of the text predicts the first draft token.
            assert [int(passes[step][0, begin - 2 + step].argmax()) for step in range(3)] == draft


def test_layers_that_are_read():
    assert [layers_read(count) for count in (1, 2, 4, 6, 36)] == [[0, 1], [0, 1, 2], [0, 2, 4], [0, 3, 6], [2, 18, 33]]


def test_every_pass_learns(target, examples, tmp_path):
    settings = replace(SMALL, steps=60, sequences=6, learning_rate=1e-2)
    head, losses = train_head(target, examples, settings, tmp_path)
    assert sum(losses[-5:]) < sum(losses[:5])
    begun = Head(target)
    before, after = (acceptance.by_position(acceptance.of_head(target, one), examples) for one in (begun, head))
    assert len(after) == acceptance.POSITIONS and sum(after[:3]) > sum(before[:3])


def test_stopped_training_goes_on_to_the_same_weights(target, examples, tmp_path):
    once, other = tmp_path / "once", tmp_path / "other"
    once.mkdir(), other.mkdir()
    whole, losses = train_head(target, examples, SMALL, once)
    with pytest.raises(KeyboardInterrupt):
        train_head(target, examples, SMALL, other, stop_after=lambda step: step == 7)
    assert (other / STATE).is_file()
    resumed, rest = train_head(target, examples, SMALL, other)
    assert rest == losses[5:]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name])


def test_acceptance_by_position_is_counted_from_every_token():
    """Right at tokens 2 and 3 of a response of four, whatever the position."""
    prompt, response = [9, 9], [1, 2, 3, 4]

    def drafted(ids):
        right = torch.tensor([[False, False, True, True, False]])  # by the token after which one is drafted
        tokens = torch.zeros_like(ids)
        tokens[:, :-1] = torch.where(right, ids[:, 1:], 0)
        return [tokens] * acceptance.POSITIONS

    found = acceptance.by_position(drafted, [(prompt, response)])
    # Four drafts of a first token, two accepted; both have a second, one accepted; that one's third is wrong.
    assert found[:4] == [0.5, 0.5, 0.0, 0.0]


def test_built_once(assets):
    kind = KINDS["eagle3"]
    assert prepare_drafter(kind, assets, SMALL)
    assert not prepare_drafter(kind, assets, SMALL)
    folder = assets / "eagle3_head"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert not list(assets.glob(".distilling*"))


@pytest.mark.parametrize(("kind", "name"), [("draft_model", "draft model"), ("eagle3", "EAGLE3 head")])
def test_acceptance_is_said_again_for_what_is_there(assets, capsys, kind, name):
    words = ["--assets", str(assets), "--kind", kind, "--prompts", "2", "--steps", "1"]
    said = []
    for _ in range(2):
        assert main(words) == 0
        said.append(capsys.readouterr().out)
    assert said[0].startswith(f"{name} built in {assets / KINDS[kind].folder}: of 4 held-out responses")
    assert said[0].count("%") == acceptance.POSITIONS and said[1] == said[0].replace("built", "found")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kind", "eagle3", "--layers", "2"], "--layers is 2: unused with --kind eagle3"),
        (["--unroll", "2"], "--unroll is 2: unused with --kind draft_model"),
        (["--kind", "eagle3", "--unroll", "0"], "--unroll is 0: expected at least 1"),
        (["--prompts", "1"], "--prompts is 1: expected at least 2"),
        (["--kind", "medusa"], "invalid choice: 'medusa'"),
    ],
)
def test_words_that_make_no_sense(tmp_path, capsys, words, said):
    with pytest.raises(SystemExit):
        main(["--assets", str(tmp_path), *words])
    assert said in capsys.readouterr().err
