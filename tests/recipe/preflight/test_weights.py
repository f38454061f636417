"""Whether a model's files are all there, from their headers and from the checksums that a download leaves."""

import hashlib
import json
import struct

import pytest

from recipe.preflight import settings
from recipe.preflight.__main__ import main
from tests.recipe.preflight.preflight_node import write_model

INDEX = settings.INDEX
SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def model(tmp_path):
    write_model(tmp_path / "model")
    return tmp_path / "model"


def found(model):
    return list(settings.weights(model))


def test_a_whole_model_has_no_problem(model, capsys):
    assert found(model) == []
    assert main(["--weights", str(model)]) == 0
    assert "model: complete, 0.0 GB of weights" in capsys.readouterr().out


def test_a_model_of_one_file(model):
    (model / INDEX).unlink()
    (model / SHARD).rename(model / "model.safetensors")
    assert found(model) == []
    with open(model / "model.safetensors", "ab") as file:
        file.truncate(100)
    assert ["[model.damaged]" in one for one in found(model)] == [True]


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


def test_checksums_as_hf_download_notes_them(model, capsys):
    assert main(["--weights", str(model), "--checksums"]) == 2
    assert "no checksums there" in capsys.readouterr().err
    notes = model / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    digest = hashlib.sha256((model / SHARD).read_bytes()).hexdigest()
    (notes / f"{SHARD}.metadata").write_text(f"commit\n{digest}\n1712656091.123\n")
    (notes / "config.json.metadata").write_text("commit\na16a55fda99d2f2e7b69cce5cf93ff4ad3049930\n1712656091.1\n")
    assert main(["--weights", str(model), "--checksums"]) == 0
    content = bytearray((model / SHARD).read_bytes())
    content[-1] ^= 1  # a flipped bit: the size is right
    (model / SHARD).write_bytes(content)
    assert main(["--weights", str(model)]) == 0
    capsys.readouterr()
    assert main(["--weights", str(model), "--checksums"]) == 2
    said = capsys.readouterr().err
    assert SHARD in said and said.endswith("[model.checksum]\n")
