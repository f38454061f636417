"""Mistakes in the choice of a draft model: one line each, before a device is taken."""

import json
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file

from recipe.launch.config import compose_config
from recipe.preflight import checks
from recipe.preflight.files import draft_model_problems

SIZES = {
    "vocab_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 2048,
}  # fmt: skip


def write(folder, **changes):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SIZES | changes))
    save_file({"weight": numpy.zeros(2, numpy.float32)}, folder / "model.safetensors")


def problems(tmp_path, *overrides, to_be_built=None):
    config = compose_config("dapo_tiny_cpu", ["speculation=hybrid", f"assets={tmp_path}", *overrides])
    return list(draft_model_problems(config, to_be_built))


@pytest.fixture
def model(tmp_path):
    write(tmp_path / "model")
    return tmp_path


def test_a_good_one(model):
    write(model / "draft_model")
    assert problems(model) == []


def test_none_is_looked_for_without_need(tmp_path):
    config = compose_config("dapo_tiny_cpu", ["speculation=sam", f"assets={tmp_path}"])
    assert list(draft_model_problems(config)) == []
    assert problems(tmp_path, to_be_built=tmp_path) == []


@pytest.mark.parametrize("method", ["draft_model", "hybrid", "eagle3"])
def test_a_script_makes_what_is_missing_below_a_relative_folder(method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = compose_config("dapo_tiny_cpu", [f"speculation={method}", "assets=assets"])
    assert list(draft_model_problems(config, to_be_built=Path("assets"))) == []
    assert [found.code for found in draft_model_problems(config)] == ["drafter.missing"]


def test_a_folder_of_ones_own_is_looked_at_before_assets_are_built(tmp_path):
    own = f"speculation.draft_model={tmp_path / 'own'}"
    (found,) = problems(tmp_path / "assets", own, to_be_built=tmp_path / "assets")
    assert found.code == "drafter.missing"


@pytest.mark.parametrize("is_there", [False, True])
def test_vllm_is_not_asked_of_a_drafter_that_is_made_later(is_there, model, monkeypatch):
    """Nor refuses it: a first run with a drafter, after runs without."""
    asked = []
    monkeypatch.setattr(checks, "find_problems", lambda *_arguments: [])
    monkeypatch.setattr(checks.vllm_command, "find_problems", lambda config: asked.append(config) or [])
    if is_there:
        write(model / "draft_model")
    config = compose_config("dapo_tiny_cpu", ["speculation=hybrid", f"assets={model}"])
    checks.check(config, to_be_built=model)
    assert bool(asked) == is_there


def test_no_folder(model):
    (found,) = problems(model)
    assert found.code == "drafter.missing" and "\n" not in found
    assert f"make it with python -m recipe.draft_model --assets {model}" in found


@pytest.mark.parametrize(
    ("changes", "code", "said"),
    [
        ({"vocab_size": 97}, "drafter.vocabulary", "vocab_size=97, the model's is 96"),
        ({"num_attention_heads": 2}, "drafter.heads", "num_attention_heads=2, the model's is 4"),
        ({"head_dim": 64}, "drafter.heads", "head_dim=64, the model's is 32"),
        ({"max_position_embeddings": 128}, "drafter.positions", "max_position_embeddings=128"),
    ],
)
def test_one_that_cannot_draft_for_the_model(model, changes, code, said):
    write(model / "draft_model", **changes)
    (found,) = problems(model)
    assert found.code == code and said in found


def test_damaged_weights(model):
    write(model / "draft_model")
    (model / "draft_model" / "model.safetensors").write_bytes(b"short")
    assert [one.code for one in problems(model)] == ["model.damaged"]


@pytest.mark.parametrize("key", ["tensor_model_parallel_size", "data_parallel_size"])
def test_ranks_and_independent_engines_are_accepted(model, key):
    write(model / "draft_model")
    assert problems(model, f"actor_rollout_ref.rollout.{key}=2") == []


def test_ranks_that_cannot_run_passes_together(model):
    write(model / "draft_model")
    key = "pipeline_model_parallel_size"
    (found,) = problems(model, f"actor_rollout_ref.rollout.{key}=2")
    assert found.code == "drafter.ranks" and f"{key}=2" in found and "\n" not in found
    (model / "model" / "config.json").write_text(json.dumps(SIZES | {"num_experts": 8}))
    (found,) = problems(model, "actor_rollout_ref.rollout.data_parallel_size=2")
    assert found.code == "drafter.ranks" and "data_parallel_size=2 of a model with experts" in found


@pytest.mark.parametrize(
    ("changes", "ranks", "said"),
    [
        ({"intermediate_size": 129}, 2, "intermediate_size=129"),
        ({"num_attention_heads": 6}, 4, "num_attention_heads=6"),
        ({"num_attention_heads": 12, "num_key_value_heads": 3}, 4, "num_key_value_heads=3"),
    ],
)
def test_one_that_ranks_cannot_divide(model, changes, ranks, said):
    write(model / "draft_model", **changes)
    found = problems(model, f"actor_rollout_ref.rollout.tensor_model_parallel_size={ranks}")
    (one,) = [one for one in found if one.code == "drafter.split"]
    assert said in one and f"tensor_model_parallel_size={ranks}" in one and "\n" not in one


def test_a_device_without_the_door(model):
    write(model / "draft_model")
    assert [one.code for one in problems(model, "trainer.device=npu")] == ["drafter.device"]
