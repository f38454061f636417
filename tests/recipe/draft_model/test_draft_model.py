"""A draft model distilled from a tiny target: learnt, resumed, and built once."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipe.draft_model.__main__ import KINDS, main, prepare_drafter
from recipe.draft_model.distil import RESPONSES, STATE, DistilSettings, distil, sample_responses, student_of, train

SMALL = DistilSettings(prompts=6, samples=2, response_tokens=12, steps=12, sequences=4, save_steps=5, threads=1)


PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


def test_the_student_learns_the_targets_distribution(target, tmp_path):
    settings = replace(SMALL, steps=60, sequences=6, learning_rate=1e-2)
    examples = sample_responses(target, PROMPTS, settings, tmp_path)
    assert [prompt for prompt, _ in examples] == [prompt for prompt in PROMPTS for _ in range(2)]
    student, losses = distil(target, examples, settings, tmp_path)
    assert student.config.num_hidden_layers == 1 and target.config.num_hidden_layers == 2
    assert sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.parametrize(("width", "expected"), [(64, 0.01), (128, 0.01), (512, 0.0025)])
def test_wider_models_learn_at_a_lower_rate(width, expected, tmp_path):
    student = torch.nn.Linear(4, 1, bias=False)
    student.config = SimpleNamespace(hidden_size=width)
    before = student.weight.detach().clone()
    settings = replace(SMALL, steps=1, learning_rate=0.01)
    train(student, lambda _batch: student.weight.sum(), [([1], [2])], settings, tmp_path)
    assert torch.allclose(before - student.weight, torch.tensor(expected), rtol=1e-3), "Adam's first step is its rate"


def test_stopped_training_goes_on_to_the_same_weights(target, tmp_path):
    once, other = tmp_path / "once", tmp_path / "other"
    once.mkdir(), other.mkdir()
    examples = sample_responses(target, PROMPTS, SMALL, once)
    whole, losses = distil(target, examples, SMALL, once)
    with pytest.raises(KeyboardInterrupt):
        distil(target, examples, SMALL, other, stop_after=lambda step: step == 7)
    assert (other / STATE).is_file()
    resumed, rest = distil(target, examples, SMALL, other)
    assert len(rest) == SMALL.steps - 5 and rest == losses[5:]
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name])


def test_responses_are_kept_and_seeded(target, tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir(), second.mkdir()
    drawn = sample_responses(target, PROMPTS, SMALL, first)
    assert sample_responses(target, PROMPTS, SMALL, second) == drawn
    torch.save([([0], [0])] * len(drawn), first / RESPONSES)
    assert sample_responses(target, PROMPTS, SMALL, first) == [([0], [0])] * len(drawn)
    assert sample_responses(target, PROMPTS, replace(SMALL, seed=1), tmp_path) != drawn


def test_built_once_and_whole(assets):
    kind = KINDS["draft_model"]
    assert prepare_drafter(kind, assets, SMALL)
    assert not prepare_drafter(kind, assets, SMALL)
    loaded = AutoModelForCausalLM.from_pretrained(assets / "draft_model")
    assert loaded.config.num_hidden_layers == 1 and (assets / "draft_model" / "tokenizer_config.json").is_file()
    assert not list(assets.glob(".distilling*"))


@pytest.mark.parametrize("layers", [0, 3])
def test_layers_that_the_target_lacks(target, layers):
    with pytest.raises(ValueError, match=f"layers={layers}: expected 1 to 2"):
        student_of(target, layers)


def test_without_a_target_one_line(tmp_path, capsys):
    assert main(["--assets", str(tmp_path)]) == 2
    assert "config.json: make model and data first" in capsys.readouterr().err
