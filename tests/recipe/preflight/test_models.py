"""What may be wrong with a draft model, an EAGLE3 head or a model's files: one line each, before a device is taken."""

import json
import struct

import numpy
import pytest
from safetensors.numpy import save_file

from sam_recipe import preflight
from sam_recipe.preflight.__main__ import main
from sam_recipe.preflight.settings import INDEX
from sam_recipe.preflight.settings import draft_model as find_problems
from tests.recipe.preflight.preflight_node import composed, config_of, tiny, write_model

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
    return tiny(folder, f"speculation.method={method}", f"speculation.draft_model={folder}/draft", *overrides)


def problems(folder, method, *overrides):
    found = list(find_problems(compose(folder, method, *overrides)))
    assert all("\n" not in one for one in found)
    return found


@pytest.fixture
def model(tmp_path):
    write(tmp_path / "model", architectures=["Qwen3ForCausalLM"])
    return tmp_path


# The drafter's config.json, other overrides, and what is said of it; nothing: it can draft.
DATA = f"{ROLLOUT}.data_parallel_size=2"
DRAFTERS = [
    ("draft_model", {}, [], None),
    ("hybrid", {}, [DATA], None),
    ("hybrid", HEAD, [], None),
    ("eagle3", HEAD | {"eagle_config": {LAYERS: [0, 4, 8]}}, [], None),
    ("eagle3", HEAD | {"eagle_config": None}, [], None),
    ("hybrid", {"vocab_size": 97}, [], "vocab_size=97, the model's is 96"),
    ("hybrid", {"head_dim": 64}, [], "head_dim=64, the model's is 32"),
    ("hybrid", {"max_position_embeddings": 128}, [], "max_position_embeddings=128"),
    ("eagle3", HEAD | {"hidden_size": 128}, [], "hidden_size=128, the model's is 64"),
    ("hybrid", HEAD | {"target_hidden_size": 32}, [], "target_hidden_size=32, the model's is 64"),
    ("eagle3", HEAD | {LAYERS: [1, 4, 9]}, [], "[1, 4, 9], expected different ones"),
    ("hybrid", HEAD | {"eagle_config": {LAYERS: [2, 2, 4]}}, [], "the model has 8 layers"),
    ("eagle3", {"architectures": ["Qwen3ForCausalLM"]}, [], "no EAGLE3 head, speculation=eagle3"),
    ("draft_model", HEAD, [], "holds an EAGLE3 head, speculation=draft_model"),
    ("draft_model", {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 96}, [], "an EAGLE3"),
]  # fmt: skip


@pytest.mark.parametrize(("method", "changes", "overrides", "said"), DRAFTERS)
def test_a_drafter_drafts_for_the_model_or_is_refused(model, method, changes, overrides, said):
    write(model / "draft", **changes)
    found = problems(model, method, *overrides)
    assert len(found) == bool(said) and all("[drafter.unlike]" in one and said in one for one in found), found


def test_damaged_weights_and_several_ranks(model):
    write(model / "draft")
    (model / "draft" / "model.safetensors").write_bytes(b"short")
    assert ["[model.damaged]" in one for one in problems(model, "hybrid")] == [True]
    write(model / "draft")
    write(model / "model", num_experts=8)
    found = problems(model, "hybrid", DATA, f"{ROLLOUT}.tensor_model_parallel_size=2")
    assert [
        "drafter.ranks" in one and f"{name}_parallel_size=2" in one
        for one, name in zip(found, ("tensor_model", "data"), strict=True)
    ] == [True] * 2


def test_a_missing_one_and_how_to_make_it(model):
    (found,) = problems(model, "hybrid")
    assert "[drafter.missing]" in found and f"make it with sam distil --assets {model} " in found
    assert list(find_problems(composed("dapo_tiny_cpu"))) == []  # none is needed
    config = config_of("dapo_qwen3_8b_cuda", "speculation.method=eagle3", "speculation.draft_model=/no/head")
    assert "point the key at a head that was trained for this model" in next(find_problems(config))


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
    monkeypatch.undo()
    for folder in (model, None):  # below assets that are still to be built none is looked for
        found = preflight.find_problems(compose(model, "hybrid"), to_be_built=folder)
        assert any("[drafter.missing]" in one for one in found) == (not is_there and folder is None)


SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def weights(tmp_path):
    write_model(tmp_path / "model")
    return tmp_path / "model"


def test_a_whole_model_has_no_problem_nor_has_one_of_one_file(weights, capsys):
    assert main(["--weights", str(weights)]) == 0
    assert "model: complete, 0.0 GB of weights" in capsys.readouterr().out
    (weights / INDEX).unlink()
    (weights / SHARD).rename(weights / "model.safetensors")
    assert main(["--weights", str(weights)]) == 0


def with_tensor(place):
    """An index that names one more tensor."""
    return lambda content: content.replace(b'"weight_map": {', b'"weight_map": {"head": ' + place + b", ")


@pytest.mark.parametrize(
    ("name", "change", "code"),  # None: the file is missing
    [
        (SHARD, None, "model.missing"),
        (SHARD, lambda content: content[:-1], "model.damaged"),
        (SHARD, lambda content: content + b" ", "model.damaged"),
        (SHARD, lambda content: b"version https://git-lfs.github.com/spec/v1\n", "model.damaged"),
        (SHARD, lambda content: struct.pack("<Q", 9) + b"{not json", "model.damaged"),
        (INDEX, None, "model.missing"),
        (INDEX, lambda content: b"{", "model.damaged"),
        (INDEX, lambda content: json.dumps({"weight_map": [SHARD]}).encode(), "model.damaged"),
        (INDEX, with_tensor(b"null"), "model.damaged"),
        (INDEX, with_tensor(json.dumps(SHARD).encode()), "model.damaged"),
    ],
)
def test_what_is_wrong_is_one_line_with_its_mend(weights, capsys, name, change, code):
    path = weights / name
    path.write_bytes(change(path.read_bytes())) if change else path.unlink()
    assert main(["--weights", str(weights)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.endswith(f"[{code}]\n") and error.count("\n") == 1
