"""Mistakes in the choice of an EAGLE3 head: one line each, before a device is taken."""

import json

import pytest

from recipe.launch.config import compose_config
from recipe.preflight import machine, speculation
from recipe.preflight.files import draft_model_problems
from recipe.preflight.machine import memory_parts
from tests.recipe.preflight.test_draft_model import write

SIZES = {"hidden_size": 64, "num_hidden_layers": 8, "intermediate_size": 128}
HEAD = {"hidden_size": 64, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"]}


METHODS = pytest.mark.parametrize("method", ["eagle3", "hybrid"])


def compose(folder, *overrides, method="eagle3"):
    head = f"speculation.draft_model={folder / 'head'}"
    return compose_config("dapo_tiny_cpu", [f"speculation={method}", head, f"assets={folder}", *overrides])


def problems(folder, *overrides, method="eagle3"):
    return list(draft_model_problems(compose(folder, *overrides, method=method)))


@pytest.fixture
def model(tmp_path):
    write(tmp_path / "model", architectures=["Qwen3ForCausalLM"], **SIZES)
    return tmp_path


@METHODS
@pytest.mark.parametrize(
    "more", [{}, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 4, 8]}}, {"eagle_config": None}]
)
def test_a_good_one(model, more, method):
    write(model / "head", **HEAD | more)
    assert problems(model, method=method) == []
    found, wrong = speculation.resolve(compose(model, method=method))
    assert wrong == [] and found["drafter"].startswith("sam.vllm.trained.eagle.Eagle3Proposer, in place of")


def test_no_folder(model):
    (found,) = problems(model)
    assert found.code == "drafter.missing" and "\n" not in found
    assert f"make it with python -m recipe.draft_model --assets {model} --kind eagle3" in found


def test_no_folder_for_a_model_that_no_head_can_be_made_for():
    config = compose_config("dapo_qwen3_8b_cuda", ["speculation=eagle3", "speculation.draft_model=/no/head"])
    (found,) = draft_model_problems(config)
    assert "point the key at a head that was trained for this model" in found


@METHODS
@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"vocab_size": 97}, "drafter.vocabulary", "vocab_size=97, the model's is 96"),
        ({"hidden_size": 128}, "drafter.hidden_size", "hidden_size=128, the model's is 64"),
        ({"target_hidden_size": 32}, "drafter.hidden_size", "target_hidden_size=32, the model's is 64"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 4, 9]}, "drafter.layers", "[1, 4, 9], the model has 8 layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 2, 4]}}, "drafter.layers", "[2, 2, 4]"),
        ({"n_predict": 3}, "drafter.tokens", "num_speculative_tokens=8"),
    ],
)
def test_one_that_cannot_read_the_model(model, changes, code, said, method):
    write(model / "head", **HEAD | changes)
    (found,) = problems(model, method=method)
    assert found.code == code and said in found and "\n" not in found


def test_layers_of_vllms_choice_that_a_small_model_lacks(tmp_path):
    write(tmp_path / "model", **SIZES | {"num_hidden_layers": 2})
    write(tmp_path / "head", **HEAD)
    assert [one.code for one in problems(tmp_path)] == ["drafter.layers"]


def test_several_ranks(model):
    write(model / "head", **HEAD)
    assert problems(model, "actor_rollout_ref.rollout.tensor_model_parallel_size=2") == []
    (found,) = problems(model, "actor_rollout_ref.rollout.pipeline_model_parallel_size=2")
    assert found.code == "drafter.ranks"


def test_a_folder_without_a_head(model):
    write(model / "head", **HEAD | {"architectures": ["Qwen3ForCausalLM"]})
    (found,) = problems(model)
    assert found.code == "drafter.kind" and "holds no EAGLE3 head, speculation=eagle3" in found
    (found,) = speculation.resolve(compose(model))[1]
    assert "Qwen3ForCausalLM is no EAGLE3 head that vLLM knows" in found


@pytest.mark.parametrize("sign", [{}, {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 96}])
def test_a_head_in_place_of_a_draft_model(model, sign):
    write(model / "head", **HEAD | sign)
    (found,) = problems(model, method="draft_model")
    assert found.code == "drafter.kind" and "holds an EAGLE3 head, speculation=draft_model" in found


@METHODS
def test_the_table_of_hidden_states_counts_as_memory(model, monkeypatch, method):
    """Three rows of 64 numbers for each token, whose keys and values are 8 layers x 2 heads x 2 x 32 numbers."""
    write(model / "head", **HEAD)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    config = compose(model, "trainer.n_gpus_per_node=2", method=method)
    assert memory_parts(config)["hidden states for EAGLE3"] == 2 * 4 * (3 * 64) / (8 * 2 * 2 * 32)
    assert memory_parts(compose(model, method="off"))["hidden states for EAGLE3"] == 0.0
    monkeypatch.setattr(machine, "free_memory_gib", lambda: 6.5)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    (found,) = [one for one in machine.find_problems(compose(model, method=method)) if one.code == "machine.memory"]
    assert "hidden states for EAGLE3 7.5" in found and "\n" not in found


def test_a_model_that_gives_no_hidden_states(model):
    write(model / "head", **HEAD)
    config = json.loads((model / "model" / "config.json").read_text())
    (model / "model" / "config.json").write_text(json.dumps(config | {"architectures": ["GPTNeoXForCausalLM"]}))
    (found,) = speculation.resolve(compose(model))[1]
    assert "GPTNeoXForCausalLM gives no hidden states to EAGLE3" in found
