"""The file of a history: bounds, several processes, kills, other machines, other tokenizers."""

import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from sam.drafting.texts import digest
from sam.history.database import ResponseLengths, add, fingerprint, open_file, own_file
from tests.sam.history.kept import kept

TOKENIZER = "1f"
PROMPT, OTHER = [1, 2, 3], [4]
MANY = 1 << 40
ROOT = Path(__file__).parents[3]


def write(folder, rows, tokens=MANY, epochs=9):
    """`rows` of (prompt, version, response)."""
    with closing(open_file(own_file(folder), TOKENIZER, to_write=True)) as connection:
        responses = [(digest(np.array(prompt)), version, np.array(text, np.int32)) for prompt, version, text in rows]
        add(connection, responses, tokens, epochs)


def test_responses_come_back_by_prompt_once_and_older_weights_first_from_the_files_of_all_machines(tmp_path):
    for _ in range(2):  # a repeated step adds nothing
        write(tmp_path, [(PROMPT, 2, [5, 6, 7]), (OTHER, 1, [8, 9]), (PROMPT, 1, [5, 5])])
    assert kept(tmp_path, PROMPT) == [[5, 5], [5, 6, 7]] and kept(tmp_path, OTHER) == [[8, 9]]
    own_file(tmp_path).rename(tmp_path / "another-host.sqlite")
    own_file(tmp_path).touch()  # one that is being made
    assert kept(tmp_path, PROMPT) == [[5, 5], [5, 6, 7]]
    write(tmp_path, [(PROMPT, 3, text) for text in ([5, 7], [7, 8], [9, 9])])
    with closing(sqlite3.connect(own_file(tmp_path))) as damaged, damaged:
        damaged.execute("UPDATE responses SET tokens = ? WHERE id = 1", [np.full(3, 1 << 30).tobytes()])
        damaged.execute("UPDATE responses SET tokens = 'text' WHERE id = 3")
    assert kept(tmp_path, PROMPT) == [[5, 5], [5, 6, 7], [7, 8]]


def test_tokens_and_epochs_are_bounded_and_old_weights_leave_first(tmp_path):
    rows = [([n], version, [version] * 10) for n, version in enumerate((3, 1, 2, 4))]
    write(tmp_path, rows, tokens=25)
    assert [len(kept(tmp_path, prompt)) for prompt, *_ in rows] == [1, 0, 0, 1]
    write(tmp_path, [], tokens=0)
    assert not any(kept(tmp_path, prompt) for prompt, *_ in rows)
    for version in (1, 4, 9):
        write(tmp_path, [(PROMPT, version, [version, n]) for n in range(3)], epochs=2)
    write(tmp_path, [(OTHER, 1, [1, 1])], epochs=2)
    assert [text[0] for text in kept(tmp_path, PROMPT)] == [4] * 3 + [9] * 3 and len(kept(tmp_path, OTHER)) == 1


def test_a_foreign_or_damaged_file_is_one_line(tmp_path):
    write(tmp_path, [(PROMPT, 1, [5, 6])])
    (damaged := tmp_path / "damaged").mkdir()
    own_file(damaged).write_text("something else, long enough to be looked at" * 100)
    for folder, tokenizer, message in (
        (tmp_path, "2e", "of tokenizer 1f, this run has 2e: choose another"),
        (damaged, TOKENIZER, "file is not a database: .* remove the file"),
        (own_file(damaged), TOKENIZER, "name a folder that can be written"),
    ):
        for to_write in (True, False):
            with pytest.raises(ValueError, match=message) as caught:
                open_file(own_file(folder), tokenizer, to_write)
            assert "\n" not in str(caught.value)


def write_for_ever(folder, writer):
    """A process that says how many responses it has committed."""
    with closing(open_file(own_file(Path(folder)), TOKENIZER, to_write=True)) as connection:
        for number in range(0, 1 << 30, 8):
            texts = [np.full(500, writer * 10**6 + number + i, np.int32) for i in range(8)]
            add(connection, [(digest(np.array(PROMPT)), 1, text) for text in texts], MANY, 9)
            print(number + 8, flush=True)
            time.sleep(0.002)  # who waits for SQLite's lock stands in no queue


def test_two_processes_killed_in_mid_write_lose_nothing_that_was_committed(tmp_path):
    """Both make the file at once, and both write all the time."""
    code = f"from tests.sam.history.test_database import write_for_ever as w; w({str(tmp_path)!r}, int(sys.argv[1]))"
    commands = [[sys.executable, "-c", f"import sys; {code}", f"{number}"] for number in range(2)]
    processes = [subprocess.Popen(one, cwd=ROOT, stdout=subprocess.PIPE, text=True) for one in commands]
    said = [[process.stdout.readline() for _ in range(8)] for process in processes]
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.wait()
    committed = [int((*lines, *process.stdout)[-1]) for lines, process in zip(said, processes, strict=True)]
    found = [[text[0] // 10**6 for text in kept(tmp_path, PROMPT)].count(writer) for writer in range(2)]
    # One more transaction may have been committed and not been said.
    assert all(0 <= there - count <= 8 for there, count in zip(found, committed, strict=True)), (found, committed)
    write(tmp_path, [(OTHER, 2, [5, 6])])
    assert kept(tmp_path, OTHER) == [[5, 6]]


def test_fingerprint_follows_the_tokenizer_alone(tmp_path):
    found = []
    for name, vocabulary, weights in (("a", "{}", "x"), ("b", "{}", "y"), ("c", "{ }", "x")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").write_text(vocabulary)
        (tmp_path / name / "model.safetensors").write_text(weights)
        found.append(fingerprint(str(tmp_path / name)))
    assert found[0] == found[1] != found[2] and fingerprint("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"


def lengths_of(lengths, *prompts):
    lengths.refresh()
    return [lengths.expected(digest(np.array(prompt, np.int32)).hex()) for prompt in prompts]


def test_lengths_are_those_of_the_newest_weights_over_the_files_of_all_machines(tmp_path, caplog):
    folder, third = tmp_path / "history", [7]
    lengths = ResponseLengths(folder)
    assert lengths_of(lengths, PROMPT) == [None], "the folder is not there yet"
    write(folder, [(PROMPT, 1, text) for text in (range(10), range(1, 11))] + [(OTHER, 1, range(500))])
    assert lengths_of(lengths, PROMPT, OTHER, third) == [10, 500, None]
    write(folder, [(PROMPT, 2, range(20))])
    own_file(folder).rename(folder / "another-host.sqlite")
    with closing(sqlite3.connect(folder / "another-host.sqlite")) as damaged, damaged:
        damaged.execute("INSERT INTO responses VALUES (NULL, x'00', x'00', 'newest', 'many', x'00')")
    (folder / "broken.sqlite").write_bytes(b"no database" * 999)
    for _ in range(2):  # a step's last response comes late
        write(folder, [(PROMPT, 2, range(80))])
        assert lengths_of(lengths, PROMPT, OTHER) == [40, 500], "the geometric mean"
    (record,) = caplog.records
    assert "broken.sqlite" in record.getMessage() and lengths.errors == 2, "warned of once"
