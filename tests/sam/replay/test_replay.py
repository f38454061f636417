"""Replay counts what an engine would: steps, accepted tokens, and whose tokens a drafter has seen when."""

from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest

from sam.drafting.texts import Drafts
from sam.record.responses import Recording
from sam.replay import main, make_drafter, replay

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
