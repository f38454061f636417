"""Replay counts what an engine would: steps, accepted tokens, and whose tokens a drafter has seen when."""

import json
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest

from sam.drafting.texts import Drafts
from sam.record.responses import Recording
from sam.tools import replay as command
from sam.tools.peers import make_peer
from sam.tools.replay import main, make_drafter, replay

K = 3


class Told:
    """Drafts what it is told for the tokens it has seen, and notes what it knows whenever it is asked."""

    def __init__(self, drafts):
        self.drafts, self.seen, self.known = drafts, {}, []

    def start(self, request_id, prompt):
        self.seen[request_id] = []

    def append(self, request_ids, token_ids, offsets):
        for row, request_id in enumerate(request_ids):
            self.seen[request_id] += token_ids[offsets[row] : offsets[row + 1]].tolist()

    def draft(self, request_ids, budgets):
        self.known.append([len(seen) for seen in self.seen.values()])
        out = [self.drafts(len(self.seen[request_id]))[: budgets[row]] for row, request_id in enumerate(request_ids)]
        bounds = np.cumsum([0, *map(len, out)])
        return Drafts(np.array(sum(out, []), np.int32), bounds, np.full(bounds[-1], 0.75))

    def finish(self, request_id): ...


def recording(*responses):
    return Recording([np.array([9], np.int32)], [[np.array(r, np.int32) for r in responses]])


@pytest.mark.parametrize(
    ("length", "drafts", "steps", "accepted"),
    [
        (8, lambda done: list(range(done, done + 3)), 2, 6),  # all of them and the bonus token
        (5, lambda done: [77, 78], 5, 0),
        (2, lambda done: [0, 1, 2][done:], 1, 2),  # a draft beyond the end
    ],
)
def test_a_step_advances_by_the_right_drafts_and_one(length, drafts, steps, accepted):
    result = replay(recording(range(length)), lambda: Told(drafts), K)
    assert (result.tokens, result.steps, result.accepted) == (length, steps, accepted)
    assert result.summary()["mean_acceptance_length"] == round(length / steps, 4)


def test_a_drafter_sees_the_accepted_tokens_only_and_is_compared_with_its_probabilities():
    told = Told(lambda done: [done, 99])
    result = replay(recording(range(6), range(4)), lambda: told, 2)
    assert list(told.seen.values()) == [list(range(6)), list(range(4))]
    assert told.known == [[0, 0], [2, 0], [2, 2], [4, 2], [4, 4]]
    assert result.summary()["calibration_error"] == 0.25


def test_what_a_tool_wrote_is_known_text_and_no_draft():
    """Two turns, of four and of three tokens, and a tool's answer between them."""
    text, told = [0, 1, 2, 3, 77, 78, 6, 7, 8], Told(lambda done: list(range(done, done + 3)))
    result = replay(replace(recording(text), given=[[[[4, 6]]]]), lambda: told, K)
    assert [*told.seen.values()] == [text] and told.known == [[0], [6]]
    assert (result.tokens, result.given, result.steps, result.accepted) == (7, 2, 2, 6)


def test_in_step_the_samples_of_a_prompt_do_not_take_turns():
    told = Told(lambda done: [done, 99])
    result = replay(recording(range(6), range(4)), lambda: told, 2, in_step=True)
    assert told.known == [[0, 0], [2, 2], [4, 4]] and (result.tokens, result.steps) == (10, 5)


def test_epochs_go_one_after_the_other_and_the_first_is_not_counted():
    text = np.random.default_rng(0).integers(0, 1000, 100).astype(np.int32)
    two = Recording([np.array([9], np.int32)], [[text, text[:60], text]], [[2, 1, 1]])
    make = partial(make_drafter, "sam", "history", K)
    kept, forgotten = (replay(two, make, K, epochs) for epochs in ("kept", "forgotten"))
    assert kept.tokens == forgotten.tokens == 100 and kept.steps < 35 and forgotten.steps > 90


def test_command_prints_a_line_for_each_file_and_drafter(tmp_path, capsys):
    arrays = {
        "prompt_tokens": [1, 2, 3], "prompt_offsets": [0, 2, 3], "response_tokens": [5, 6, 5, 6, 7, 5, 6, 5, 6, 7],
        "response_offsets": [0, 5, 7, 10], "response_prompt": [0, 0, 1],
    }  # fmt: skip
    np.savez(one := tmp_path / "one.npz", **arrays)
    np.savez(two := tmp_path / "two.npz", **arrays, response_epoch=[0, 1, 1])
    drafters = ["sam", *(["suffix"] if find_spec("arctic_inference") else [])]
    assert main(["--traces", str(one), str(two), "--drafter", *drafters]) == 0
    header, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    expected = [[file, name, "10", "0"] for file in ("one.npz", "two.npz") for name in drafters]
    assert [line[:4] for line in lines] == expected
    assert {len(line) for line in (header, *lines)} == {10}
    assert main(["--traces", str(two), "--epochs"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[1:4] == ["sam", "5", "0"]
    assert main(["--traces", str(one), "--epochs"]) == 2
    assert "0 epochs in this recording: expected two or more in response_epoch" in capsys.readouterr().err


def drafts_of(name, prompt, *corpus):
    """What a peer drafts behind a text."""
    peer = make_peer(name, "group", K)
    if corpus:
        peer.read_corpus([(np.array([], np.int32), np.array(text, np.int32)) for text in corpus])
    peer.start("other", np.array([8] * 2000, np.int32))
    peer.start("a", np.array(prompt[:3], np.int32))
    peer.append(["a"], np.array(prompt[3:], np.int32), [0, len(prompt) - 3])
    drafts = peer.draft(["a", "other"], np.array([K, 1]))
    return drafts.token_ids[: drafts.offsets[1]].tolist()


TEXT = [7, 1, 2, 3, 20, 21, 22, 5, 2, 3, 30, 31, 32, 1, 2, 3, 40, 41, 42, 6, 2, 3]


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("pld-transformers", TEXT, [20, 21, 22]),  # the oldest match of two tokens
        ("pld-vllm", TEXT, [20, 21, 22]),
        ("pld-newest", TEXT, [40, 41, 42]),
        ("pld-newest", [*TEXT[:19], 5, 2, 3], [30, 31, 32]),  # the longest one before the newest
        ("pld-vllm", [*TEXT, 77, 78, 79], []),
        ("pld-newest", [*TEXT, 77, 78, 79], []),
        ("pld-transformers", [4, 1, 9, 4], [1, 9, 4]),  # a match of one token
    ],
)
def test_prompt_lookup_drafts_what_follows_a_match(name, text, expected):
    assert drafts_of(name, text) == expected


def test_rest_drafts_what_most_often_follows_the_longest_match_in_a_corpus():
    corpus = [
        [1, 2, 3, 20, 21],
        [1, 2, 3, 30, 31],
        [9, 1, 2, 3, 30, 31],
        [2, 3, 50],
        [2, 3, 50],
        [2, 3, 50],
        [2, 3, 50],
    ]
    assert drafts_of("rest", [6, 6, 1, 2, 3], *corpus) == [30, 31]
    assert drafts_of("rest", [9, 9, 9, 2, 3], *corpus) == [50]
    assert drafts_of("rest", [1, 1, 1, 1, 88], *corpus) == []


def test_a_missing_package_is_said_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    def missing(name, *_):
        raise ImportError(f"no module for {name}")

    monkeypatch.setattr(command, "make_peer", missing)
    monkeypatch.setattr(command, "replay", lambda *_, **__: pytest.fail("it has measured"))
    assert main(["--traces", str(tmp_path / "one.npz"), "--drafter", "sam", "suffix"]) == 2
    assert capsys.readouterr().err.startswith("error: drafter suffix: no module for suffix; install requirements/")


def test_a_recording_that_cannot_be_split_is_said_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "replay", lambda *_, **__: pytest.fail("it has measured"))
    rows = [json.dumps({"prompt_tokens": [prompt], "response_tokens": [3, 4]}) + "\n" for prompt in (1, 2)]
    (tmp_path / "two.jsonl").write_text("".join(rows))
    (tmp_path / "one.jsonl").write_text(rows[0])
    assert main(["--traces", str(tmp_path / "two.jsonl"), str(tmp_path / "one.jsonl"), "--split"]) == 2
    assert capsys.readouterr().err.endswith("one.jsonl: --split with 1 prompt: expected two or more\n")


def test_json_is_one_object_with_a_corpus_read_beforehand(tmp_path, capsys):
    text, rows = list(range(100, 160)), tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt_tokens": [p], "response_tokens": text}) + "\n" for p in (1, 2)))
    trace = ["--traces", str(rows), "--json", "--drafter", "sam"]
    assert main([*trace, "rest", "--split"]) == 0
    split = json.loads(capsys.readouterr().out)
    assert split["split"] and [row["drafter"] for row in split["rows"]] == ["sam", "rest"]
    assert {row["tokens"] for row in split["rows"]} == {60} and split["rows"][1]["mean_acceptance_length"] > 3
    assert main([*trace, "--corpus", str(rows)]) == main(trace) == 0
    with_corpus, without = (json.loads(line)["rows"][0] for line in capsys.readouterr().out.splitlines())
    assert with_corpus["mean_acceptance_length"] > without["mean_acceptance_length"]
    for words, said in (
        (["rest"], "add --corpus or --split"),
        (["--corpus", "nowhere.npz"], "nowhere.npz: no such file"),
    ):
        assert main([*trace, *words]) == 2
        out, error = capsys.readouterr()
        assert not out and said in error.splitlines()[-1]
    assert main([*trace[:2], "--drafter", "sam", "pld-newest", "--late", "2", "--table"]) == 0
    header, *lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert header[-1] == "rows.jsonl"
    assert [(line[0], len(line)) for line in lines] == [("sam", 3), ("pld-newest", 3), ("sam-late-2", 3)]
