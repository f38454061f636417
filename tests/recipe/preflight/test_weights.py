"""Whether a model's files are all there, from their headers."""

import json
import struct

import pytest

from sam_recipe.preflight.__main__ import main
from sam_recipe.preflight.settings import INDEX
from tests.recipe.preflight.preflight_node import write_model

SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def model(tmp_path):
    write_model(tmp_path / "model")
    return tmp_path / "model"


def test_a_whole_model_has_no_problem_nor_has_one_of_one_file(model, capsys):
    assert main(["--weights", str(model)]) == 0
    assert "model: complete, 0.0 GB of weights" in capsys.readouterr().out
    (model / INDEX).unlink()
    (model / SHARD).rename(model / "model.safetensors")
    assert main(["--weights", str(model)]) == 0


def shard(change):
    """Has the bytes of a shard changed."""
    return lambda model: (model / SHARD).write_bytes(change((model / SHARD).read_bytes()))


def index(change):
    """Has the index changed."""

    def spoil(model):
        known = json.loads((model / INDEX).read_text())
        change(known)
        (model / INDEX).write_text(json.dumps(known))

    return spoil


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda model: (model / SHARD).unlink(), "model.missing"),
        (shard(lambda content: content[:-1]), "model.damaged"),
        (shard(lambda content: content + b" "), "model.damaged"),
        (shard(lambda _: b"version https://git-lfs.github.com/spec/v1\n"), "model.damaged"),
        (shard(lambda _: struct.pack("<Q", 9) + b"{not json"), "model.damaged"),
        (lambda model: (model / INDEX).write_text("{"), "model.damaged"),
        (lambda model: (model / INDEX).unlink(), "model.missing"),
        (index(lambda known: known.update(weight_map=[SHARD])), "model.damaged"),
        (index(lambda known: known["weight_map"].update(head=None)), "model.damaged"),
        (index(lambda known: known["weight_map"].update(head=SHARD)), "model.damaged"),
    ],
)
def test_what_is_wrong_is_one_line_with_its_mend(model, capsys, spoil, code):
    spoil(model)
    assert main(["--weights", str(model)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.endswith(f"[{code}]\n") and error.count("\n") == 1
