"""What may be wrong with a trained drafter or a model's files: one line each, before a device is taken."""

import json
import struct

import numpy
import pytest
from safetensors.numpy import save_file

from recipe.sam_dapo.preflight import settings
from recipe.sam_dapo.preflight.__main__ import main
from sam.history.database import fingerprint, open_file, own_file
from tests.recipe.sam_dapo.preflight.preflight_node import tiny, write_model

HEAD = {"num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle3"]}
SHARD = "model-00002-of-00002.safetensors"


def found_of_drafter(folder, method):
    overrides = (f"speculation.method={method}", f"speculation.draft_model={folder}/draft")
    return list(settings.draft_model(tiny(folder, *overrides)))


@pytest.mark.parametrize(
    ("method", "drafter", "said"),
    [
        ("draft_model", {}, None),
        ("hybrid", HEAD, None),
        ("eagle3", HEAD, None),
        ("eagle3", {}, "no EAGLE3 head, speculation=eagle3"),
        ("draft_model", HEAD, "holds an EAGLE3 head, speculation=draft_model"),
        ("draft_model", {"draft_vocab_size": 96}, "an EAGLE3"),
    ],
)
def test_a_drafter_is_there_whole_and_of_its_kind(assets, method, drafter, said):
    (missing,) = found_of_drafter(assets, method)
    made = f"make it with sam distil --assets {assets} [drafter.missing]"
    assert missing.endswith(made) == (method != "eagle3")
    (draft := assets / "draft").mkdir()
    (draft / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"]} | drafter))
    save_file({"weight": numpy.zeros(2, numpy.float32)}, draft / "model.safetensors")
    found = found_of_drafter(assets, method)
    assert len(found) == bool(said) and all(said in one and "[drafter.unlike]" in one for one in found)
    (draft / "model.safetensors").write_bytes(b"short")
    (damaged,) = found_of_drafter(assets, method)
    assert said or "[model.damaged]" in damaged


@pytest.mark.parametrize(
    ("name", "change", "code"),  # None: the file is missing
    [
        (SHARD, lambda content: content, None),
        (SHARD, None, "model.missing"),
        (SHARD, lambda content: content[:-1], "model.damaged"),
        (SHARD, lambda content: b"version https://git-lfs.github.com/spec/v1\n", "model.damaged"),
        (SHARD, lambda content: struct.pack("<Q", 9) + b"{not json", "model.damaged"),
        (settings.INDEX, None, "model.missing"),
        (settings.INDEX, lambda content: json.dumps({"weight_map": [SHARD]}).encode(), "model.damaged"),
    ],
)
def test_weights_are_all_there_or_one_line_says_what_to_do(tmp_path, capsys, name, change, code):
    write_model(weights := tmp_path / "model")
    path = weights / name
    path.write_bytes(change(path.read_bytes())) if change else path.unlink()
    assert main(["--weights", str(weights)]) == (2 if code else 0)
    said = capsys.readouterr()
    if code:
        assert said.err.startswith("error: ") and said.err.endswith(f"[{code}]\n") and said.err.count("\n") == 1
    else:
        assert "model: complete, 0.0 GB of weights" in said.out


def test_a_history_of_another_tokenizer_or_in_a_place_that_cannot_be_written(assets):
    def found(folder):
        config = tiny(assets, "speculation.scope=history", f"speculation.history_path={folder}")
        return list(settings.history_of_responses(config))

    history = assets / "history"
    assert found(history) == [] and not history.exists()
    open_file(own_file(history), fingerprint(str(assets / "model")), to_write=True).close()
    assert found(history) == []
    open_file(own_file(assets / "other"), "of another", to_write=True).close()
    for name, said in {"other": "a history of tokenizer of another", "train.parquet": "cannot be written"}.items():
        (problem,) = found(assets / name)
        assert problem.endswith("[history.unusable]") and said in problem


def test_a_corpus_that_is_missing_or_of_another_tokenizer_is_one_line(assets):
    def found(*names):
        paths = ",".join(str(assets / name) for name in names)
        return list(settings.corpus(tiny(assets, f"speculation.corpus=[{paths}]")))

    for name, token in (("good", 3), ("other", 10**6)):
        row = {"prompt_tokens": [1], "response_tokens": [token]}
        (assets / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    assert found() == []
    for name, said in {"other": "token 1000000, the model knows 0 to", "nowhere": "no such file"}.items():
        (problem,) = found("good.jsonl", f"{name}.jsonl")
        assert f"{name}.jsonl: {said}" in problem and problem.endswith("[corpus.unusable]")
