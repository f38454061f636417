"""The file of a history: bounds, several processes, kills, other machines, other tokenizers."""

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from sam.history import __main__ as command
from sam.history.database import (
    HistoryError,
    Response,
    add,
    check_folder,
    digest,
    num_tokens,
    open_to_write,
    own_file,
)
from sam.history.fingerprint import fingerprint
from sam.history.reading import load

WRITTEN_IN = {"tokenizer": "1f", "model": "qwen3"}
PROMPT, OTHER = np.array([1, 2, 3], np.int32), np.array([4], np.int32)
MANY = 1 << 40
ROOT = Path(__file__).parents[3]


def write(folder, rows, writer=1, tokens=MANY, epochs=9):
    """`rows` of (prompt, version, response)."""
    with closing(open_to_write(own_file(folder), WRITTEN_IN)) as connection:
        responses = [Response(digest(prompt), version, np.array(text, np.int32)) for prompt, version, text in rows]
        add(connection, responses, writer, tokens, epochs)
        return num_tokens(connection)


def texts(folder, prompt):
    found = load(folder, [prompt], WRITTEN_IN)
    return [piece.tolist() for piece in np.split(found.tokens, found.offsets[1:-1])] if len(found.prompts) else []


def test_responses_come_back_by_prompt_older_weights_first(tmp_path):
    write(tmp_path, [(PROMPT, 2, [5, 6, 7]), (OTHER, 1, [8, 9]), (PROMPT, 1, [5, 5])])
    found = load(tmp_path, [OTHER, np.array([77]), PROMPT], WRITTEN_IN)
    assert found.prompts.tolist() == [0, 2, 2] and found.offsets.tolist() == [0, 2, 4, 7]
    assert found.tokens.dtype == np.int32 and found.tokens.tolist() == [8, 9, 5, 5, 5, 6, 7]


def test_a_repeated_step_adds_nothing(tmp_path):
    for _ in range(2):
        assert write(tmp_path, [(PROMPT, 1, [5, 6]), (PROMPT, 1, [5, 7]), (PROMPT, 1, [5, 6])]) == 4
    assert sorted(texts(tmp_path, PROMPT)) == [[5, 6], [5, 7]]


def test_tokens_are_bounded_and_old_weights_leave_first(tmp_path):
    rows = [(np.array([n], np.int32), version, [version] * 10) for n, version in enumerate((3, 1, 2, 4))]
    assert write(tmp_path, rows, tokens=25) == 20
    assert [len(texts(tmp_path, prompt)) for prompt, *_ in rows] == [1, 0, 0, 1]
    assert write(tmp_path, [], tokens=0) == 0


def test_each_prompt_keeps_its_last_epochs(tmp_path):
    for version in (1, 4, 9):
        write(tmp_path, [(PROMPT, version, [version, n]) for n in range(3)], epochs=2)
    write(tmp_path, [(OTHER, 1, [1, 1])], epochs=2)
    assert sorted({text[0] for text in texts(tmp_path, PROMPT)}) == [4, 9] and len(texts(tmp_path, PROMPT)) == 6
    assert len(texts(tmp_path, OTHER)) == 1


@pytest.mark.parametrize(("key", "other"), [("tokenizer", "2e"), ("model", "llama")])
def test_history_of_another_tokenizer_or_model_is_refused(tmp_path, key, other):
    write(tmp_path, [(PROMPT, 1, [5, 6])])
    for use in (check_folder, lambda folder, found: open_to_write(own_file(folder), found)):
        with pytest.raises(HistoryError, match=f"of {key} .*, this run has {other}: choose another") as caught:
            use(tmp_path, {**WRITTEN_IN, key: other})
        assert "\n" not in str(caught.value)
    with pytest.raises(HistoryError, match=f"this run has {other}"):
        load(tmp_path, [PROMPT], {**WRITTEN_IN, key: other})


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for use in (check_folder, lambda folder, found: open_to_write(own_file(folder), found)):
        with pytest.raises(HistoryError, match="name a folder that can be written") as caught:
            use(tmp_path / "file" / "history", WRITTEN_IN)
        assert "\n" not in str(caught.value)


def test_what_is_no_database_is_refused(tmp_path):
    own_file(tmp_path).write_text("something else, long enough to be looked at" * 100)
    with pytest.raises(HistoryError, match="file is not a database"):
        check_folder(tmp_path, WRITTEN_IN)


def test_a_file_that_another_process_is_making_is_empty(tmp_path):
    sqlite3.connect(own_file(tmp_path)).close()
    own_file(tmp_path).touch()
    assert texts(tmp_path, PROMPT) == []
    check_folder(tmp_path, WRITTEN_IN)
    assert write(tmp_path, [(PROMPT, 1, [5, 6])]) == 2


def test_files_of_other_machines_are_merged(tmp_path):
    write(tmp_path, [(PROMPT, 1, [5, 6])])
    own_file(tmp_path).rename(tmp_path / "another-host.sqlite")
    write(tmp_path, [(PROMPT, 2, [5, 7])])
    assert texts(tmp_path, PROMPT) == [[5, 6], [5, 7]]


def run_writers(folder, count, **keywords):
    code = f"from tests.sam.history.test_database import write_for_ever as w; w({str(folder)!r}"
    commands = [[sys.executable, "-c", f"{code}, {number})"] for number in range(count)]
    return [subprocess.Popen(one, cwd=ROOT, stdout=subprocess.PIPE, text=True, **keywords) for one in commands]


def write_for_ever(folder, writer):
    """A process that says how many responses it has committed."""
    with closing(open_to_write(own_file(Path(folder)), WRITTEN_IN)) as connection:
        for number in range(1 << 30):
            rows = [
                Response(digest(PROMPT), 1, np.full(500, writer * 10**6 + 8 * number + i, np.int32)) for i in range(8)
            ]
            add(connection, rows, writer, MANY, 9)
            print(8 * number + 8, flush=True)


def test_two_processes_killed_in_mid_write_lose_nothing_that_was_committed(tmp_path):
    """Both make the file at once, and both write all the time."""
    processes = run_writers(tmp_path, 2)
    said = [[process.stdout.readline() for _ in range(20)] for process in processes]
    for process in processes:
        process.send_signal(signal.SIGKILL)
        process.wait()
    committed = [int((*lines, *process.stdout)[-1]) for lines, process in zip(said, processes, strict=True)]
    assert min(committed) >= 160
    assert command.main(["verify", str(tmp_path)]) == 0
    with closing(sqlite3.connect(own_file(tmp_path))) as connection:
        kept = dict(connection.execute("SELECT writer, count(*) FROM responses GROUP BY writer"))
    # One more transaction may have been committed and not been said.
    assert all(0 <= kept[writer] - count <= 8 for writer, count in enumerate(committed)), (kept, committed)
    assert write(tmp_path, [(OTHER, 2, [5, 6])]) > 0 and texts(tmp_path, OTHER) == [[5, 6]]


def damage(folder, number):
    with closing(sqlite3.connect(own_file(folder))) as connection, connection:
        connection.execute("UPDATE responses SET tokens = ? WHERE id = ?", (np.full(3, 1 << 30).tobytes(), number))


def test_a_damaged_response_is_left_out_and_found_by_verify(tmp_path, capsys):
    write(tmp_path, [(PROMPT, 1, [5, 6]), (PROMPT, 1, [7, 8])])
    assert command.main(["verify", str(tmp_path)]) == 0
    assert "2 responses, none damaged" in capsys.readouterr().out
    damage(tmp_path, 1)
    assert texts(tmp_path, PROMPT) == [[7, 8]]
    assert command.main(["verify", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "1 of 2 responses are damaged" in line


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE meta SET value = value + 5 WHERE key = 'tokens'",
        "UPDATE meta SET value = 'many' WHERE key = 'tokens'",
        "DELETE FROM meta",
        "UPDATE responses SET tokens = 'text'",
        "UPDATE responses SET version = 'new'",
        "DROP TABLE responses",
    ],
)
def test_every_action_takes_a_damaged_file_in_one_line(tmp_path, capsys, statement):
    write(tmp_path, [(PROMPT, 1, [5, 6]), (PROMPT, 2, [7, 8])])
    with closing(sqlite3.connect(own_file(tmp_path))) as connection, connection:
        connection.execute(statement)
    before = own_file(tmp_path).read_bytes()
    for action, expected in (("stat", (0, 2)), ("verify", (2,)), ("prune", (2,))):
        assert command.main([action, str(tmp_path), "--tokens", "1"]) in expected
        assert capsys.readouterr().err.count("\n") <= 1
    assert own_file(tmp_path).read_bytes() == before


def test_stat_and_prune(tmp_path, capsys):
    write(tmp_path, [(PROMPT, version, [version] * 1000) for version in range(1, 200)], epochs=999)
    assert command.main(["stat", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "199 responses to 1 prompts, 199000 tokens, weight versions 1 to 199" in said and "tokenizer 1f" in said
    before = os.path.getsize(own_file(tmp_path))
    assert command.main(["prune", str(tmp_path), "--tokens", "2000", "--epochs", "100"]) == 0
    assert "197 responses removed, 2000 tokens left" in capsys.readouterr().out
    assert os.path.getsize(own_file(tmp_path)) < before / 5
    assert {text[0] for text in texts(tmp_path, PROMPT)} == {198, 199}


def test_a_folder_without_history_is_one_line(tmp_path, capsys):
    assert command.main(["stat", str(tmp_path)]) == 2
    assert "no history there" in capsys.readouterr().err


def test_fingerprint_follows_tokenizer_and_shape_not_weights(tmp_path):
    def model(name, vocabulary, layers, weights):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "tokenizer.json").write_text(vocabulary)
        (folder / "config.json").write_text(f'{{"model_type": "qwen3", "num_hidden_layers": {layers}}}')
        (folder / "model.safetensors").write_text(weights)
        return fingerprint(str(folder))

    first = model("a", "{}", 2, "x")
    assert first["model"] == "qwen3, num_hidden_layers 2"
    assert model("b", "{}", 2, "y") == first
    assert model("c", "{ }", 2, "x")["tokenizer"] != first["tokenizer"]
    assert model("d", "{}", 3, "x")["model"] != first["model"]
    assert fingerprint("Qwen/Qwen3-8B") == {"tokenizer": "Qwen/Qwen3-8B", "model": "Qwen/Qwen3-8B"}
