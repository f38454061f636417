"""Lengths of earlier responses, from files that engines have written."""

import logging
from contextlib import closing

import numpy as np

from sam.drafting.texts import digest
from sam.history import database
from sam.history.database import ResponseLengths

PROMPTS = [np.array([90 + n, 91, 92 + n], np.int32) for n in range(3)]
NAMES = [digest(prompt).hex() for prompt in PROMPTS]


def add(folder, version, lengths, file="another.sqlite", prompt=0, first=0):
    """Responses of these lengths, no two equal; those of one `first` are equal from call to call."""
    texts = [np.arange(first + i, first + i + length, dtype=np.int32) for i, length in enumerate(lengths)]
    responses = [(digest(PROMPTS[prompt]), version, text) for text in texts]
    with closing(database.open_file(folder / file, {"tokenizer": "1f", "model": "qwen3"}, to_write=True)) as connection:
        database.add(connection, responses, tokens=1 << 40, epochs=9)


def expected(lengths):
    lengths.refresh()
    return [lengths.expected(name) for name in NAMES]


def test_the_newest_weights_count_over_the_files_of_all_machines(tmp_path):
    add(tmp_path, 1, [10, 10, 10])
    add(tmp_path, 2, [20], "a.sqlite", first=100)
    add(tmp_path, 2, [80], "b.sqlite", first=200)
    assert expected(ResponseLengths(tmp_path)) == [40, None, None], "the geometric mean"


def test_later_reads_find_what_is_new_and_forget_nothing(tmp_path):
    folder = tmp_path / "history"
    lengths = ResponseLengths(folder)
    assert expected(lengths) == [None] * 3, "the folder is not there yet"
    add(folder, 1, [500], prompt=1)
    for version, length, first in ((1, 10, 0), (2, 30, 100), (2, 120, 200)):  # a step's last response comes late
        add(folder, version, [length], first=first)
        lengths.refresh()
    add(folder, 9, [3], prompt=2)
    assert expected(lengths) == [60, 500, 3] and len(lengths) == 3
    add(folder, 9, [120], first=200)  # word for word again, with newer weights
    assert expected(lengths)[0] == 120


def test_a_damaged_file_is_left_out_and_warned_of_once(tmp_path, caplog):
    add(tmp_path, 1, [10])
    (tmp_path / "broken.sqlite").write_bytes(b"no database" * 999)
    lengths = ResponseLengths(tmp_path)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert expected(lengths)[0] == 10
    (record,) = caplog.records
    assert "broken.sqlite" in record.getMessage() and lengths.errors == 2


def test_memory_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("sam.history.database.MAX_PROMPTS", 2)
    for prompt in range(3):
        add(tmp_path, 1, [10], prompt=prompt)
    lengths = ResponseLengths(tmp_path)
    lengths.refresh()
    assert len(lengths) == 2
