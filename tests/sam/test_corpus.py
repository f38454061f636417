"""`sam corpus build`, and that a corpus holds its texts and nothing else."""

import json

import numpy as np
import pytest

from sam.automaton import corpus_file
from sam.automaton.corpus_file import load_corpus
from sam.corpus import build, main


@pytest.fixture
def texts(tmp_path):
    rng = np.random.default_rng(0)
    rows = [rng.integers(30, size=rng.integers(1, 80)).tolist() for _ in range(50)]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"tokens": row}) + "\n" for row in rows))
    return path


def test_rows_of_tokens_and_recordings_are_texts(texts, tmp_path, capsys):
    output, recording = tmp_path / "corpus.sam", tmp_path / "rollouts.jsonl"
    recording.write_text(2 * (json.dumps({"prompt_tokens": [1, 2], "response_tokens": [3, 4, 5]}) + "\n"))
    assert main(["build", str(texts), str(recording), "-o", str(output)]) == 0
    assert "speculation.corpus=" in capsys.readouterr().out
    rows = [json.loads(line)["tokens"] for line in texts.read_text().splitlines()]
    assert load_corpus(output).groups[0]["num_tokens"] == 10 + sum(map(len, rows))


def test_what_memory_held_before_does_not_reach_the_file(texts, tmp_path, monkeypatch):
    build([texts], tmp_path / "one.sam")
    make_store = corpus_file.make_store

    def store_of_used_memory(count):
        made = make_store(count)
        made.nodes.view(np.uint8)[:] = 77
        made.hash_buckets[1:] = 77
        return made

    monkeypatch.setattr(corpus_file, "make_store", store_of_used_memory)
    build([texts], tmp_path / "two.sam")
    for file in (tmp_path / "one.sam").iterdir():
        assert file.read_bytes() == (tmp_path / "two.sam" / file.name).read_bytes()


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("missing.jsonl", None, "no such file"),
        ("texts.txt", "1 2 3", "expected .npz or .jsonl"),
        ("texts.jsonl", '{"tokens": [1]}\n{"tokens": [-1]}\n', "line 2, tokens[0]: expected a token id"),
        ("texts.jsonl", '{"tokens": []}\n', "no token in any text"),
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
