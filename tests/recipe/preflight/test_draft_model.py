"""Mistakes in the choice of a draft model or an EAGLE3 head: one line each, before a device is taken."""

import json

import numpy
import pytest
from safetensors.numpy import save_file

from recipe import preflight
from recipe.preflight.settings import draft_model as find_problems
from tests.recipe.preflight.preflight_node import composed, config_of

SIZES = {
    "vocab_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 64,
    "num_hidden_layers": 8, "intermediate_size": 128, "max_position_embeddings": 2048,
}  # fmt: skip
HEAD = {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"]}
LAYERS = "eagle_aux_hidden_state_layer_ids"
ROLLOUT = "actor_rollout_ref.rollout"


def write(folder, **changes):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SIZES | changes))
    save_file({"weight": numpy.zeros(2, numpy.float32)}, folder / "model.safetensors")


def compose(folder, method, *overrides):
    own = [f"assets={folder}", f"actor_rollout_ref.model.path={folder}/model"]
    own += [f"data.{name}_files={folder}/{name}.parquet" for name in ("train", "val")]
    draft = (f"speculation={method}", f"speculation.draft_model={folder}/draft")
    return config_of("dapo_tiny_cpu", *draft, *own, *overrides)


def problems(folder, method, *overrides):
    found = list(find_problems(compose(folder, method, *overrides)))
    assert all("\n" not in one for one in found)
    return found


@pytest.fixture
def model(tmp_path):
    write(tmp_path / "model", architectures=["Qwen3ForCausalLM"])
    return tmp_path


@pytest.mark.parametrize(
    ("method", "changes", "overrides"),
    [
        ("draft_model", {}, []),
        ("hybrid", {}, [f"{ROLLOUT}.data_parallel_size=2"]),
        ("hybrid", HEAD, []),
        ("eagle3", HEAD, [f"{ROLLOUT}.tensor_model_parallel_size=2"]),
        ("eagle3", HEAD | {"eagle_config": {LAYERS: [0, 4, 8]}}, []),
        ("eagle3", HEAD | {"eagle_config": None}, []),
    ],
)
def test_a_good_one(model, method, changes, overrides):
    write(model / "draft", **changes)
    assert problems(model, method, *overrides) == []


BAD = [
    ("hybrid", {"vocab_size": 97}, [], "drafter.unlike", "vocab_size=97, the model's is 96"),
    ("hybrid", {"num_attention_heads": 2}, [], "drafter.unlike", "num_attention_heads=2, the model's is 4"),
    ("hybrid", {"head_dim": 64}, [], "drafter.unlike", "head_dim=64, the model's is 32"),
    ("hybrid", {"max_position_embeddings": 128}, [], "drafter.unlike", "max_position_embeddings=128"),
    ("hybrid", {"intermediate_size": 129}, [f"{ROLLOUT}.tensor_model_parallel_size=2"], "drafter.unlike",
     "intermediate_size=129 does not divide among tensor_model_parallel_size=2"),
    ("eagle3", HEAD | {"vocab_size": 97}, [], "drafter.unlike", "vocab_size=97"),
    ("eagle3", HEAD | {"hidden_size": 128}, [], "drafter.unlike", "hidden_size=128, the model's is 64"),
    ("hybrid", HEAD | {"target_hidden_size": 32}, [], "drafter.unlike", "target_hidden_size=32, the model's is 64"),
    ("eagle3", HEAD | {LAYERS: [1, 4, 9]}, [], "drafter.unlike", "[1, 4, 9], expected different ones"),
    ("hybrid", HEAD | {"eagle_config": {LAYERS: [2, 2, 4]}}, [], "drafter.unlike", "the model has 8 layers"),
    ("eagle3", {"architectures": ["Qwen3ForCausalLM"]}, [], "drafter.unlike", "no EAGLE3 head, speculation=eagle3"),
    ("draft_model", HEAD, [], "drafter.unlike", "holds an EAGLE3 head, speculation=draft_model"),
    ("draft_model", {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 96}, [], "drafter.unlike", "an EAGLE3"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "changes", "overrides", "code", "said"), BAD)
def test_one_that_cannot_draft_for_the_model(model, method, changes, overrides, code, said):
    write(model / "draft", **changes)
    (found,) = problems(model, method, *overrides)
    assert code in found and said in found


def test_damaged_weights_and_data_parallel_ranks_of_experts(model):
    write(model / "draft")
    (model / "draft" / "model.safetensors").write_bytes(b"short")
    assert ["[model.damaged]" in one for one in problems(model, "hybrid")] == [True]
    write(model / "draft")
    write(model / "model", num_experts=8)
    (found,) = problems(model, "hybrid", f"{ROLLOUT}.data_parallel_size=2")
    assert "drafter.ranks" in found and "data_parallel_size=2 of a model with experts" in found


@pytest.mark.parametrize(("method", "more"), [("hybrid", ""), ("eagle3", " --kind eagle3")])
def test_a_missing_one_and_how_to_make_it(model, method, more):
    (found,) = problems(model, method)
    assert "[drafter.missing]" in found
    assert f"make it with sam distil --assets {model}{more} " in found
    assert list(find_problems(composed("dapo_tiny_cpu"))) == []  # none is needed
    config = config_of("dapo_qwen3_8b_cuda", "speculation.method=eagle3", "speculation.draft_model=/no/head")
    assert "point the key at a head that was trained for this model" in next(find_problems(config))


def test_one_below_assets_that_are_still_to_be_built_is_not_looked_for(tmp_path):
    for folder, is_said in ((tmp_path, False), (None, True)):
        found = preflight.find_problems(compose(tmp_path, "hybrid"), to_be_built=folder)
        assert any("[drafter.missing]" in one for one in found) == is_said


@pytest.mark.parametrize("is_there", [False, True])
def test_vllm_is_not_asked_of_a_drafter_that_is_made_later(is_there, model, monkeypatch):
    """Nor refuses it: a first run with a drafter, after runs without."""
    asked = []
    monkeypatch.setattr(preflight, "find_problems", lambda *_arguments: [])
    monkeypatch.setattr(preflight.vllm_command, "taken_by_verl_and_vllm", lambda config: asked.append(config) or [])
    if is_there:
        write(model / "draft")
    preflight.check(compose(model, "hybrid"), to_be_built=model)
    assert bool(asked) == is_there
