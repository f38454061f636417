"""Mistakes in the choice of an EAGLE3 head: one line each, before a device is taken."""

import json

import pytest

from recipe.launch.config import compose_config
from recipe.preflight import speculation
from recipe.preflight.files import draft_model_problems
from tests.recipe.preflight.test_draft_model import write

SIZES = {"hidden_size": 64, "num_hidden_layers": 8}
HEAD = {"hidden_size": 64, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"]}


def compose(folder, *overrides):
    head = f"speculation.draft_model={folder / 'head'}"
    return compose_config("dapo_tiny_cpu", ["speculation=eagle3", head, f"assets={folder}", *overrides])


def problems(folder, *overrides):
    return list(draft_model_problems(compose(folder, *overrides)))


@pytest.fixture
def model(tmp_path):
    write(tmp_path / "model", architectures=["Qwen3ForCausalLM"], **SIZES)
    return tmp_path


@pytest.mark.parametrize(
    "more", [{}, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 4, 8]}}, {"eagle_config": None}]
)
def test_a_good_one(model, more):
    write(model / "head", **HEAD | more)
    assert problems(model) == []
    assert speculation.resolve(compose(model))[1] == []


def test_no_folder(model):
    (found,) = problems(model)
    assert found.code == "drafter.missing" and "trained for this model" in found and "\n" not in found


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"vocab_size": 97}, "drafter.vocabulary", "vocab_size=97, the model's is 96"),
        ({"hidden_size": 128}, "drafter.hidden_size", "hidden_size=128, the model's is 64"),
        ({"target_hidden_size": 32}, "drafter.hidden_size", "target_hidden_size=32, the model's is 64"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 4, 9]}, "drafter.layers", "[1, 4, 9], the model has 8 layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 2, 4]}}, "drafter.layers", "[2, 2, 4]"),
    ],
)
def test_one_that_cannot_read_the_model(model, changes, code, said):
    write(model / "head", **HEAD | changes)
    (found,) = problems(model)
    assert found.code == code and said in found and "\n" not in found


def test_layers_of_vllms_choice_that_a_small_model_lacks(tmp_path):
    write(tmp_path / "model", **SIZES | {"num_hidden_layers": 2})
    write(tmp_path / "head", **HEAD)
    assert [one.code for one in problems(tmp_path)] == ["drafter.layers"]


def test_several_ranks(model):
    write(model / "head", **HEAD)
    (found,) = problems(model, "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
    assert found.code == "drafter.ranks"


def test_a_folder_without_a_head(model):
    write(model / "head", **HEAD | {"architectures": ["Qwen3ForCausalLM"]})
    (found,) = speculation.resolve(compose(model))[1]
    assert "Qwen3ForCausalLM is no EAGLE3 head that vLLM knows" in found


def test_a_model_that_gives_no_hidden_states(model):
    write(model / "head", **HEAD)
    config = json.loads((model / "model" / "config.json").read_text())
    (model / "model" / "config.json").write_text(json.dumps(config | {"architectures": ["GPTNeoXForCausalLM"]}))
    (found,) = speculation.resolve(compose(model))[1]
    assert "GPTNeoXForCausalLM gives no hidden states to EAGLE3" in found
