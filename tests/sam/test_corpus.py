"""`sam corpus build`: a corpus holds its texts, is mapped as it was saved, and nothing else is taken for one."""

import json
import shutil

import numpy as np
import pytest

from sam import corpus
from sam.automaton.store import Store
from sam.corpus import build, corpus_of, load_corpus, main, save_corpus


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
    make_store = corpus.make_store

    def store_of_used_memory(count):
        made = make_store(count)
        made.nodes.view(np.uint8)[:] = 77
        made.hash_buckets[1:] = 77
        return made

    monkeypatch.setattr(corpus, "make_store", store_of_used_memory)
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


@pytest.fixture
def made():
    return corpus_of([np.random.default_rng(0).integers(20, size=5000).astype(np.int32)], 5000)


def test_save_and_load(made, tmp_path):
    path = tmp_path / "corpus.sam"
    for _ in range(2):  # the second replaces the first
        save_corpus(made, path)
    loaded = load_corpus(path)
    assert loaded.groups[0]["num_tokens"] == 5000 and loaded.counters == made.counters
    for name in Store._fields:
        mapped, original = getattr(loaded, name), getattr(made, name)
        assert (mapped == original[: len(mapped)]).all()
        assert isinstance(mapped.base.base, np.memmap), "pages are the file's, shared by all who map it"
    assert [entry.name for entry in tmp_path.iterdir()] == ["corpus.sam"]


def damage_bytes(change):
    return lambda folder: (folder / "nodes.npy").write_bytes(change((folder / "nodes.npy").read_bytes()))


def damage_header(**changes):
    def damage(folder, name="header.json"):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changes))

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        damage_bytes(lambda whole: whole[:-1]),
        damage_bytes(lambda whole: b""),
        damage_bytes(lambda whole: b"x" + whole[1:]),
        damage_bytes(lambda whole: whole[:-9] + b"\x01" + whole[-8:]),
        lambda folder: shutil.copy(folder / "blocks.npy", folder / "groups.npy"),
        lambda folder: (folder / "hash_buckets.npy").unlink(),
        lambda folder: (folder / "header.json").write_text("{"),
        damage_header(format=1),
        damage_header(crc32={}),
    ],
)
def test_damaged_corpora(made, tmp_path, damage):
    save_corpus(made, tmp_path / "corpus.sam")
    damage(tmp_path / "corpus.sam")
    with pytest.raises(ValueError, match="damaged or not an automaton"):
        load_corpus(tmp_path / "corpus.sam")


def test_other_paths(made, tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        load_corpus(tmp_path / "missing.sam")
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(ValueError, match="a folder that is no corpus"):
        save_corpus(made, tmp_path)
    assert (tmp_path / "mine").read_text() == "kept"
    (tmp_path / "corpus.sam").write_bytes(b"SAM\x00v001 and more")  # a file of the old format is replaced
    with pytest.raises(ValueError, match="damaged or not an automaton"):
        load_corpus(tmp_path / "corpus.sam")
    save_corpus(made, tmp_path / "corpus.sam")
    assert load_corpus(tmp_path / "corpus.sam").groups[0]["num_tokens"] == 5000
