"""A draft model distilled from a tiny target: learnt, resumed, and built once."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from sam_recipe.draft_model import distil
from sam_recipe.draft_model.__main__ import KINDS, class_of, main, prepare_drafter
from sam_recipe.draft_model.distil import RESPONSES, STATE, Settings, Student, acceptance, sample_responses, train

SMALL = Settings(prompts=6, samples=2, response_tokens=12, steps=12, sequences=4, save_steps=5, threads=1, unroll=3)
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
EACH_KIND = pytest.mark.parametrize("kind", [class_of(kind) for kind in KINDS], ids=KINDS)


@pytest.fixture(scope="module")
def examples(target, tmp_path_factory):
    return sample_responses(target, PROMPTS, SMALL, tmp_path_factory.mktemp("responses"))


def trained(kind, target, examples, settings, folder):
    folder.mkdir(exist_ok=True)
    drafter = kind(target, settings)
    return drafter, train(target, drafter, examples, settings, folder)


@EACH_KIND
def test_it_learns_the_targets_distribution(kind, target, examples, tmp_path):
    settings = replace(SMALL, steps=60, sequences=6, learning_rate=1e-2)
    drafter, losses = trained(kind, target, examples, settings, tmp_path)
    assert sum(losses[-5:]) < sum(losses[:5])
    before, after = (acceptance(target, one, examples) for one in (kind(target, settings), drafter))
    assert len(after) == distil.POSITIONS
    # A copy of the target's layers is right now and then before it has learnt anything.
    assert kind is Student or sum(after[:3]) > sum(before[:3])


@pytest.mark.parametrize(("width", "expected"), [(64, 0.01), (128, 0.01), (512, 0.0025)])
def test_wider_models_learn_at_a_lower_rate(target, width, expected, tmp_path, monkeypatch):
    student = torch.nn.Linear(4, 1, bias=False)
    student.config, student.layers_read = SimpleNamespace(hidden_size=width), ()
    before = student.weight.detach().clone()
    monkeypatch.setattr(distil, "loss_of", lambda *_batch: student.weight.sum())
    train(target, student, [([1], [2])], replace(SMALL, steps=1, learning_rate=0.01), tmp_path)
    assert torch.allclose(before - student.weight, torch.tensor(expected), rtol=1e-3), "Adam's first step is its rate"


@EACH_KIND
def test_stopped_training_goes_on_to_the_same_weights(kind, target, examples, tmp_path, monkeypatch):
    whole, losses = trained(kind, target, examples, SMALL, tmp_path / "once")
    save = distil._save

    def save_and_stop(*given):
        save(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(distil, "_save", save_and_stop)
        trained(kind, target, examples, SMALL, tmp_path / "other")
    assert (tmp_path / "other" / STATE).is_file()
    resumed, rest = trained(kind, target, examples, SMALL, tmp_path / "other")
    assert len(rest) == SMALL.steps - 5 and rest == losses[5:]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name])


def test_responses_are_kept_and_seeded(target, examples, tmp_path):
    assert [prompt for prompt, _ in examples] == [prompt for prompt in PROMPTS for _ in range(2)]
    assert sample_responses(target, PROMPTS, SMALL, tmp_path) == examples
    torch.save([([0], [0])] * len(examples), tmp_path / RESPONSES)
    assert sample_responses(target, PROMPTS, SMALL, tmp_path) == [([0], [0])] * len(examples)
    (tmp_path / RESPONSES).unlink()
    assert sample_responses(target, PROMPTS, replace(SMALL, seed=1), tmp_path) != examples


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


@EACH_KIND
def test_built_once_and_whole(assets, kind):
    assert prepare_drafter(kind, assets, SMALL)
    assert not prepare_drafter(kind, assets, SMALL)
    assert (assets / kind.folder / "tokenizer_config.json").is_file()
    assert not list(assets.glob(".distilling*"))
    if kind is Student:
        assert AutoModelForCausalLM.from_pretrained(assets / kind.folder).config.num_hidden_layers == 1


@pytest.mark.parametrize("layers", [0, 3])
def test_layers_that_the_target_lacks(target, layers):
    with pytest.raises(ValueError, match=f"layers={layers}: expected 1 to 2"):
        Student(target, replace(SMALL, layers=layers))


@pytest.mark.parametrize(("kind", "name"), [("draft_model", "draft model"), ("eagle3", "EAGLE3 head")])
def test_acceptance_is_said_again_for_what_is_there(assets, capsys, kind, name):
    words = ["--assets", str(assets), "--kind", kind, "--prompts", "2", "--steps", "1"]
    said = []
    for _ in range(2):
        assert main(words) == 0
        said.append(capsys.readouterr().out)
    assert said[0].startswith(f"{name} built in {assets / class_of(kind).folder}: of 4 held-out responses")
    assert said[0].count("%") == distil.POSITIONS and said[1] == said[0].replace("built", "found")


def test_without_a_target_one_line(tmp_path, capsys):
    assert main(["--assets", str(tmp_path)]) == 2
    assert "config.json: make model and data first" in capsys.readouterr().err


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
