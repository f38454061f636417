"""A draft model distilled from a tiny target: learnt, built once, and what is said of it."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from recipe.sam_dapo import draft_model
from recipe.sam_dapo.draft_model import Settings, acceptance, make_student, sample_responses, train
from recipe.sam_dapo.tiny.assets import prepare_assets
from tests.recipe.sam_dapo.tiny.test_tiny import SMALL

PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    prepare_assets(output := tmp_path_factory.mktemp("tiny") / "assets", SMALL)
    return output


def test_it_learns_the_targets_distribution(assets):
    target = AutoModelForCausalLM.from_pretrained(assets / "model").float()
    settings = Settings(samples=2, response_tokens=12, steps=60, sequences=6, learning_rate=1e-2, threads=1)
    examples, student = sample_responses(target, PROMPTS, settings), make_student(target, 1)
    assert [prompt for prompt, _ in examples] == [prompt for prompt in PROMPTS for _ in range(2)]
    losses = train(target, student, examples, settings)
    assert sum(losses[-5:]) < sum(losses[:5])


def test_acceptance_by_position_is_counted_from_every_token():
    """Right at tokens 2 and 3 of a response of four, whatever the position."""

    def tokens(input_ids, **_):
        right = torch.tensor([[False, False, True, True, False]])  # by the token after which one is drafted
        found = torch.zeros_like(input_ids)
        found[:, :-1] = torch.where(right, input_ids[:, 1:], 0)
        return SimpleNamespace(last_hidden_state=found)

    student = SimpleNamespace(base_model=tokens, lm_head=lambda found: torch.nn.functional.one_hot(found, 20))
    found = acceptance(student, [([9, 9], [1, 2, 3, 4])])
    # Four drafts of a first token, two accepted; both have a second, one accepted; that one's third is wrong.
    assert found[:4] == [0.5, 0.5, 0.0, 0.0]


def test_it_is_built_once_and_its_acceptance_is_said(assets, capsys):
    said, folder = [], assets / "draft_model"
    for _ in range(2):
        assert draft_model.main(["--assets", str(assets), "--prompts", "2", "--steps", "1"]) == 0
        said.append(capsys.readouterr().out.splitlines())
    (shares, built), found = said
    assert shares.startswith("of 4 held-out responses") and shares.count("%") == draft_model.POSITIONS
    assert (built, *found) == tuple(f"draft model {word} in {folder}" for word in ("built", "found"))
    assert (folder / "tokenizer_config.json").is_file()
    assert AutoModelForCausalLM.from_pretrained(folder).config.num_hidden_layers == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompts", "1"], "--prompts is 1: expected at least 2"),
        (["--layers", "3"], "layers=3: expected 1 to 2, the target's"),
        (["--assets", "/nowhere"], "config.json: make model and data first"),
    ],
)
def test_words_that_make_no_sense_or_no_target(assets, capsys, words, said):
    try:
        code = draft_model.main(["--assets", str(assets), *words])
    except SystemExit as ended:
        code = ended.code
    assert code == 2 and said in capsys.readouterr().err
