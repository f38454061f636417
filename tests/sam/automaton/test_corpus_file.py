"""A saved corpus is mapped as it was, and nothing else is taken for one."""

import json
import shutil

import numpy as np
import pytest

from sam.automaton.corpus_file import corpus_of, load_corpus, save_corpus
from sam.automaton.store import Store


@pytest.fixture
def corpus():
    return corpus_of([np.random.default_rng(0).integers(20, size=5000).astype(np.int32)], 5000)


def test_save_and_load(corpus, tmp_path):
    path = tmp_path / "corpus.sam"
    for _ in range(2):  # the second replaces the first
        save_corpus(corpus, path)
    loaded = load_corpus(path)
    assert loaded.groups[0]["num_tokens"] == 5000 and loaded.counters == corpus.counters
    for name in Store._fields:
        mapped, original = getattr(loaded, name), getattr(corpus, name)
        assert (mapped == original[: len(mapped)]).all()
        assert isinstance(mapped.base.base, np.memmap), "pages are the file's, shared by all who map it"
    assert [entry.name for entry in tmp_path.iterdir()] == ["corpus.sam"]


def test_a_file_of_the_old_format_is_refused_and_replaced(corpus, tmp_path):
    path = tmp_path / "corpus.sam"
    path.write_bytes(b"SAM\x00v001 and more")
    with pytest.raises(ValueError, match="damaged or not an automaton"):
        load_corpus(path)
    save_corpus(corpus, path)
    assert load_corpus(path).groups[0]["num_tokens"] == 5000


def damage_bytes(change):
    def damage(folder):
        file = folder / "nodes.npy"
        file.write_bytes(change(file.read_bytes()))

    return damage


def damage_header(**changes):
    def damage(folder):
        header = json.loads((folder / "header.json").read_text())
        (folder / "header.json").write_text(json.dumps(header | changes))

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
def test_damaged_corpora(corpus, tmp_path, damage):
    save_corpus(corpus, tmp_path / "corpus.sam")
    damage(tmp_path / "corpus.sam")
    with pytest.raises(ValueError, match="damaged or not an automaton"):
        load_corpus(tmp_path / "corpus.sam")


def test_other_paths(corpus, tmp_path):
    with pytest.raises(ValueError, match="no such file"):
        load_corpus(tmp_path / "missing.sam")
    (tmp_path / "mine").write_text("kept")
    with pytest.raises(ValueError, match="a folder that is no corpus"):
        save_corpus(corpus, tmp_path)
    assert (tmp_path / "mine").read_text() == "kept"
