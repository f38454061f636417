"""Lengths of earlier responses, from files that engines have written."""

import logging
from contextlib import closing

import numpy as np
import pytest

from sam.drafting.drafter import Drafter
from sam.drafting.token_ids import digest
from sam.history import database
from sam.history.client import HistoryClient
from sam.history.lengths import ResponseLengths

WRITTEN_IN = {"tokenizer": "1f", "model": "qwen3"}
PROMPTS = [np.array([90 + n, 91, 92 + n], np.int32) for n in range(3)]
NAMES = [digest(prompt).hex() for prompt in PROMPTS]


def add(folder, version, lengths, file="another.sqlite", prompt=PROMPTS[0], first=0):
    """Responses of these lengths, no two equal; those of one `first` are equal from call to call."""
    texts = [np.arange(first + i, first + i + length, dtype=np.int32) for i, length in enumerate(lengths)]
    responses = [database.Response(digest(prompt), version, text) for text in texts]
    with closing(database.open_to_write(folder / file, WRITTEN_IN)) as connection:
        database.add(connection, responses, writer=1, tokens=1 << 40, epochs=9)


def read(folder) -> ResponseLengths:
    lengths = ResponseLengths(folder)
    lengths.refresh()
    return lengths


def test_what_engines_have_written_is_expected_of_a_prompt(tmp_path):
    client, drafter = HistoryClient(tmp_path, WRITTEN_IN, 1 << 40, 9), Drafter(max_draft_tokens=3)
    client.start()
    for number, (prompt, length) in enumerate(((0, 10), (0, 1000), (1, 7))):
        client.request_started(f"{number}", PROMPTS[prompt], drafter)
        client.request_finished(f"{number}", list(range(number, number + length)))
    client.stop()
    lengths = read(tmp_path)
    assert [lengths.expected(name) for name in NAMES] == [100, 7, None], "100: the geometric mean of 10 and 1000"
    assert len(lengths) == 2 and lengths.errors == 0


def test_the_newest_weights_count_over_the_files_of_all_machines(tmp_path):
    add(tmp_path, 1, [10, 10, 10])
    add(tmp_path, 2, [20], "a.sqlite", first=100)
    add(tmp_path, 2, [80], "b.sqlite", first=200)
    assert read(tmp_path).expected(NAMES[0]) == 40


def test_later_reads_find_what_is_new_and_forget_nothing(tmp_path):
    lengths = read(tmp_path / "history")
    assert lengths.expected(NAMES[0]) is None, "the folder is not there yet"
    folder = tmp_path / "history"
    add(folder, 1, [10])
    add(folder, 1, [500], prompt=PROMPTS[1])
    lengths.refresh()
    add(folder, 2, [30], first=100)
    lengths.refresh()
    add(folder, 2, [120], first=200)  # the last response of the step comes late
    lengths.refresh()
    add(folder, 9, [3], prompt=PROMPTS[2])
    lengths.refresh()
    assert [lengths.expected(name) for name in NAMES] == [60, 500, 3]
    add(folder, 9, [120], first=200)  # word for word again, with newer weights
    lengths.refresh()
    assert lengths.expected(NAMES[0]) == 120


def test_a_damaged_file_is_left_out_and_warned_of_once(tmp_path, caplog):
    add(tmp_path, 1, [10])
    (tmp_path / "broken.sqlite").write_bytes(b"no database" * 999)
    with caplog.at_level(logging.WARNING):
        lengths = read(tmp_path)
        lengths.refresh()
    assert lengths.expected(NAMES[0]) == 10 and lengths.errors == 2
    (record,) = caplog.records
    assert "broken.sqlite" in record.getMessage()


@pytest.mark.parametrize("most", [1, 2])
def test_memory_is_bounded(tmp_path, monkeypatch, most):
    monkeypatch.setattr("sam.history.lengths.MAX_PROMPTS", most)
    for prompt in PROMPTS:
        add(tmp_path, 1, [10], prompt=prompt)
    assert len(read(tmp_path)) == most
