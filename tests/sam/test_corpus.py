"""A corpus is what one pass over its texts gives, however often the build was interrupted."""

import json

import numpy as np
import pytest

from sam import corpus
from sam.automaton import store
from sam.corpus import build, main
from sam.drafting.corpus import SuffixAutomaton


@pytest.fixture
def texts(tmp_path):
    rng = np.random.default_rng(0)
    rows = [rng.integers(30, size=rng.integers(1, 80)).tolist() for _ in range(50)]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"tokens": row}) + "\n" for row in rows))
    return path


def test_build_and_use(texts, tmp_path, capsys):
    output = tmp_path / "corpus.sam"
    assert main(["build", str(texts), "-o", str(output)]) == 0
    assert "speculation.corpus=" in capsys.readouterr().out
    rows = [json.loads(line)["tokens"] for line in texts.read_text().splitlines()]
    assert SuffixAutomaton.load(output).num_tokens == sum(map(len, rows))


def test_recordings_are_texts_as_well(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    rows = [{"prompt_tokens": [1, 2], "response_tokens": [3, 4, 5]}] * 2
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert build([path], tmp_path / "corpus.sam") == 10


class Interrupted(Exception): ...


def test_an_interrupted_build_goes_on_and_gives_the_same_file(texts, tmp_path, monkeypatch, capsys):
    whole, resumed = tmp_path / "whole.sam", tmp_path / "resumed.sam"
    build([texts], whole)
    saved, save_partial = [], corpus._save_partial

    def interrupt(*arguments):
        save_partial(*arguments)
        saved.append(arguments[-1])
        if len(saved) in (3, 6):
            raise Interrupted

    monkeypatch.setattr(corpus, "_save_partial", interrupt)
    for _ in range(2):
        with pytest.raises(Interrupted):
            build([texts], resumed, save_every=0.0)
        assert not resumed.exists()
    build([texts], resumed, save_every=0.0)
    assert saved == list(range(1, 51))
    assert capsys.readouterr().err.count("going on after") == 2
    assert resumed.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["resumed.sam", "texts.jsonl", "whole.sam"]


def test_what_memory_held_before_does_not_reach_the_file(texts, tmp_path, monkeypatch):
    build([texts], tmp_path / "one.sam")
    make_store = store.make_store

    def store_of_used_memory(count):
        made = make_store(count)
        made.records[:] = 77
        made.heads[1:] = 77
        return made

    monkeypatch.setattr(store, "make_store", store_of_used_memory)
    build([texts], tmp_path / "two.sam")
    assert (tmp_path / "one.sam").read_bytes() == (tmp_path / "two.sam").read_bytes()


def test_other_inputs_start_over(texts, tmp_path):
    output = tmp_path / "corpus.sam"
    partial = tmp_path / "corpus.sam.building"
    corpus._save_partial(SuffixAutomaton(1 << 20), partial, "other inputs", 7)
    tokens = build([texts], output)
    assert SuffixAutomaton.load(output).num_tokens == tokens


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("missing.jsonl", None, "no such file"),
        ("texts.txt", "1 2 3", "expected .npz or .jsonl"),
        ("texts.jsonl", '{"tokens": [1]}\n{"tokens": "abc"}\n', "line 2: expected a row with a list of token ids"),
        ("texts.jsonl", '{"tokens": [1]}\n{"tokens": [4294967296]}\n', "line 2: expected a row"),
        ("texts.jsonl", "not JSON", "texts.jsonl: not a recording"),
        ("texts.jsonl", '{"tokens": [-1]}\n', "expected token ids from 0"),
    ],
)
def test_bad_input(tmp_path, name, content, message, capsys):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    assert main(["build", str(path), "-o", str(tmp_path / "corpus.sam")]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not (tmp_path / "corpus.sam").exists()
