"""Whether a model's files are all there, from their headers."""

import json
import struct

import pytest

from sam_recipe.preflight import settings
from sam_recipe.preflight.__main__ import main
from tests.recipe.preflight.preflight_node import write_model

INDEX = settings.INDEX
SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def model(tmp_path):
    write_model(tmp_path / "model")
    return tmp_path / "model"


def found(model):
    return list(settings.weights(model))


def test_a_whole_model_has_no_problem_nor_has_one_of_one_file(model, capsys):
    assert found(model) == []
    assert main(["--weights", str(model)]) == 0
    assert "model: complete, 0.0 GB of weights" in capsys.readouterr().out
    (model / INDEX).unlink()
    (model / SHARD).rename(model / "model.safetensors")
    assert found(model) == []


def rewrite(model, change):
    index = json.loads((model / INDEX).read_text())
    change(index)
    (model / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda model: (model / SHARD).unlink(), "model.missing"),
        (lambda model: (model / SHARD).write_bytes((model / SHARD).read_bytes()[:-1]), "model.damaged"),
        (lambda model: (model / SHARD).write_bytes((model / SHARD).read_bytes() + b" "), "model.damaged"),
        (lambda model: (model / SHARD).write_text("version https://git-lfs.github.com/spec/v1\n"), "model.damaged"),
        (lambda model: (model / SHARD).write_bytes(struct.pack("<Q", 9) + b"{not json"), "model.damaged"),
        (lambda model: (model / INDEX).write_text("{"), "model.damaged"),
        (lambda model: (model / INDEX).unlink(), "model.missing"),
        (lambda model: rewrite(model, lambda index: index.update(weight_map=[SHARD])), "model.damaged"),
        (lambda model: rewrite(model, lambda index: index["weight_map"].update(head=None)), "model.damaged"),
        (lambda model: rewrite(model, lambda index: index["weight_map"].update(head=SHARD)), "model.damaged"),
    ],
)
def test_what_is_wrong_is_one_line_with_its_mend(model, capsys, spoil, code):
    spoil(model)
    (problem,) = found(model)
    assert f"[{code}]" in problem and "\n" not in problem
    assert main(["--weights", str(model)]) == 2
    assert capsys.readouterr().err == f"error: {problem}\n"
