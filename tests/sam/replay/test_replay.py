"""Replay counts what an engine would: steps, accepted tokens, who sees whose tokens."""

import json
from functools import partial

import numpy as np
import pytest

from sam.corpus import main as build_corpus
from sam.drafting.drafts import Drafts
from sam.reading import ReadError
from sam.record.responses import Recording, read_recording
from sam.replay.__main__ import main
from sam.replay.baselines import make_drafter
from sam.replay.cost import measure_cost
from sam.replay.round_robin import replay


class Oracle:
    """Drafts what it is told, and notes what it was shown."""

    nbytes = 0

    def __init__(self, drafts):
        self.drafts, self.seen = drafts, {}

    def start(self, request_id, prompt, policy_version=0):
        self.seen[request_id] = []

    def append(self, request_ids, token_ids, offsets):
        for row, request_id in enumerate(request_ids):
            self.seen[request_id] += token_ids[offsets[row] : offsets[row + 1]].tolist()

    def draft(self, request_ids, budgets):
        out = [self.drafts(len(self.seen[request_id]))[: budgets[row]] for row, request_id in enumerate(request_ids)]
        bounds = np.concatenate([[0], np.cumsum([len(draft) for draft in out])])
        return Drafts(np.array(sum(out, []), np.int32), bounds, np.full(bounds[-1], 0.75), np.empty(0, np.int32))

    def finish(self, request_id): ...


def recording(*responses):
    return Recording([np.array([9], np.int32)], [[np.array(r, np.int32) for r in responses]])


def test_perfect_drafts_advance_by_all_of_them_and_the_bonus_token():
    result = replay(recording(range(8)), lambda: Oracle(lambda done: list(range(done, done + 3))), 3)
    assert (result.tokens, result.steps, result.drafted, result.accepted) == (8, 2, 6, 6)
    assert result.summary()["mean_acceptance_length"] == 4.0


def test_wrong_and_missing_drafts_advance_by_one():
    for drafts in ([], [77, 78]):
        result = replay(recording(range(5)), lambda drafts=drafts: Oracle(lambda _: drafts), 3)
        assert (result.tokens, result.steps, result.accepted) == (5, 5, 0)


def test_draft_beyond_the_end_counts_what_is_there():
    result = replay(recording(range(2)), lambda: Oracle(lambda done: [0, 1, 2][done:]), 3)
    assert (result.tokens, result.steps, result.accepted) == (2, 1, 2)


def test_a_drafter_sees_the_prompt_and_accepted_tokens_only():
    """At most the tokens that the last step advanced by; never what is to come."""
    oracle = Oracle(lambda done: [done, 99])
    replay(recording(range(6), range(4)), lambda: oracle, 2, order="engine")
    assert all(seen == list(range(len(seen))) for seen in oracle.seen.values())
    assert {len(seen) for seen in oracle.seen.values()} == {6, 4}


def test_orders_differ_in_when_siblings_see_tokens():
    text = np.random.default_rng(0).integers(0, 1000, 200)
    lengths = {
        order: replay(recording(text, text), partial(make_drafter, "sam", "group", 3), 3, order=order).steps
        for order in ("turns", "engine")
    }
    # Taking turns, the second twin follows the first; at once, both are new all the way.
    assert lengths["turns"] < 310 < 390 < lengths["engine"]


def test_samples_that_share_a_drafter_help_each_other():
    text = np.random.default_rng(0).integers(0, 1000, 200)
    shared = replay(recording(text, text), partial(make_drafter, "sam", "group", 3), 3)
    alone = replay(recording(text, text), partial(make_drafter, "sam", "group", 3), 3, samples=1)
    assert alone.summary()["mean_acceptance_length"] < 1.1 < 1.3 < shared.summary()["mean_acceptance_length"]
    assert shared.tokens == alone.tokens == 400


def test_first_occurrence_follows_the_first_of_two_continuations():
    drafter = make_drafter("first-occurrence", "request", 3)
    drafter.start("a", np.array([1, 2, 3, 4, 5, 1, 2, 6, 7]))
    drafter.append(["a"], np.array([1, 2]), np.array([0, 2]))
    drafts = drafter.draft(["a"], np.array([3]))
    assert drafts.token_ids.tolist() == [3, 4, 5]


def test_calibration_compares_predicted_acceptance_with_what_stood():
    result = replay(recording(range(8)), lambda: Oracle(lambda done: [done, 99]), 2)
    assert result.calibration() == [(0.75, 0.5)]
    assert result.summary()["calibration_error"] == 0.25


def random_walk(rng, length):
    """Text with structure: mostly the successor of the last token, sometimes any."""
    jumps = np.where(rng.random(length) < 0.8, 1, rng.integers(50, size=length))
    return (np.cumsum(jumps) % 50).tolist()


def test_acceptance_is_calibrated_on_text_it_was_not_made_for():
    rng = np.random.default_rng(0)
    result = replay(recording(*(random_walk(rng, 3000) for _ in range(4))), partial(make_drafter, "sam", "group", 4), 4)
    predicted_often = [row for row in result.by_probability if row[0] > 500]
    assert len(predicted_often) >= 4
    assert all(abs(predicted - observed) / drafts < 0.05 for drafts, predicted, observed in predicted_often)


def test_cost_pass_plays_every_response_to_its_end():
    rng = np.random.default_rng(0)
    many = Recording(
        [np.array([i], np.int32) for i in range(150)],
        [[np.array(random_walk(rng, int(rng.integers(1, 40))), np.int32) for _ in range(3)] for _ in range(150)],
    )
    advanced, made = [], []

    def make():
        made.append(make_drafter("sam", "group", 3))
        return made[-1]

    cost = measure_cost(many, make, 3, advanced.append)
    assert sum(advanced) == many.num_tokens
    assert not made[0]._slots
    assert set(cost) == {"draft_us_per_step", "extend_ns_per_token", "us_per_token", "bytes_per_token"}


@pytest.fixture
def npz(tmp_path):
    path = tmp_path / "trace.npz"
    arrays = {
        "prompt_tokens": [1, 2, 3], "prompt_offsets": [0, 2, 3], "response_tokens": [5, 6, 5, 6, 7, 5, 6, 5, 6, 7],
        "response_offsets": [0, 5, 7, 10], "response_prompt": [0, 0, 1],
    }  # fmt: skip
    np.savez(path, **{name: np.array(value) for name, value in arrays.items()})
    return path


def test_reads_arrays_and_this_projects_rollouts(npz, tmp_path):
    from_arrays = read_recording(npz)
    assert [len(samples) for samples in from_arrays.responses] == [2, 1]
    rows = [
        {"prompt_tokens": prompt.tolist(), "response_tokens": response.tolist()}
        for prompt, samples in zip(from_arrays.prompts, from_arrays.responses, strict=True)
        for response in samples
    ]
    path = tmp_path / "1.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    from_rows = read_recording(path)
    assert from_rows.num_tokens == from_arrays.num_tokens == 10
    assert [p.tolist() for p in from_rows.prompts] == [p.tolist() for p in from_arrays.prompts]


@pytest.mark.parametrize("content", [b"", b"not a zip", None])
def test_what_is_no_recording_is_named(tmp_path, content):
    path = tmp_path / "broken.npz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ReadError, match="broken.npz"):
        read_recording(path)


def test_text_needs_its_tokenizer(tmp_path):
    path = tmp_path / "1.jsonl"
    path.write_text(json.dumps({"input": "a", "output": "b"}))
    with pytest.raises(ReadError, match="--tokenizer"):
        read_recording(path)


def test_command_prints_one_object_for_each_file_and_drafter(npz, capsys):
    code = main(["--traces", str(npz), "--drafter", "sam", "first-occurrence", "--json", "--by-position"])
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 0
    assert [(row["drafter"], row["tokens"]) for row in rows] == [("sam", 10), ("first-occurrence", 10)]
    assert rows[0]["by_position"][0][0] == 0
    wanted = "drafter scope k tokens steps mean_acceptance_length acceptance_rate acceptance_per_position"
    assert {*wanted.split(), "draft_us_per_step", "extend_ns_per_token", "bytes_per_token"} <= set(rows[0])


def test_plot_by_position(npz, tmp_path, capsys, pictures):
    assert main(["--traces", str(npz), "--no-cost", "--plot", str(tmp_path / "positions.png")]) == 0
    (axes,) = pictures[0].axes
    (line,) = axes.lines
    assert len(line.get_xdata()) > 0 and min(line.get_ydata()) >= 1.0
    assert "mean acceptance length from position" in capsys.readouterr().out


def test_corpus_of_the_recording_itself_leaves_little_to_verify(npz, tmp_path, capsys):
    corpus = tmp_path / "corpus.sam"
    assert build_corpus(["build", str(npz), "-o", str(corpus)]) == 0
    capsys.readouterr()
    lengths = []
    for more in ([], ["--corpus", str(corpus)]):
        assert main(["--traces", str(npz), "--no-cost", "--json", "--scope", "request", *more]) == 0
        lengths.append(json.loads(capsys.readouterr().out)["mean_acceptance_length"])
    assert lengths[0] <= lengths[1]
    assert main(["--traces", str(npz), "--corpus", str(npz)]) == 2
    assert "damaged or not an automaton" in capsys.readouterr().err


def test_unknown_drafter_is_one_line(npz, capsys):
    assert main(["--traces", str(npz), "--drafter", "sma"]) == 2
    assert "expected one of sam" in capsys.readouterr().err.splitlines()[-1]
