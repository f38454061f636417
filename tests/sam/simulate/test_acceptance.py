"""Tables of acceptance: what drafting on a recording fills them with, and what is drawn from them."""

from functools import partial

import numpy as np
import pytest

from sam.drafting.drafter import Drafter
from sam.record.responses import Recording
from sam.replay.baselines import make_drafter
from sam.simulate.acceptance import CELL, POSITIONS, Acceptance, draw_records, main, measure, read_drafts
from sam.simulate.drafting import DrawnDrafts, GroupDrafts, RealDrafts
from sam.simulate.engine import Cluster
from sam.simulate.lengths import recorded_round
from sam.simulate.rollout import Choice, Real, simulate
from sam.switch.step_cost import linear

SAM = partial(make_drafter, "sam", "group", 3)


@pytest.fixture(scope="module")
def recording():
    """Samples that say much the same in another order each, and each thing once."""
    chance = np.random.default_rng(0)
    phrases = [chance.integers(0, 5000, 30) for _ in range(20)]
    samples = [np.concatenate([phrases[i] for i in chance.permutation(20)]).astype(np.int32) for _ in range(8)]
    return Recording([np.array([1, 2, 3], np.int32)], [samples])


@pytest.fixture(scope="module")
def table(recording):
    return measure(recording, SAM, 3, source="a test")


def test_more_siblings_are_accepted_more_often(table):
    assert table.siblings.tolist() == [1, 2, 4, 8]
    lengths = [table.mean_length(n, 300) for n in (1, 2, 4, 8)]
    assert lengths == sorted(lengths) and lengths[0] < 1.1 < 2.0 < lengths[-1]


def test_as_it_was_saved(table, tmp_path):
    table.save(tmp_path / "table.json")
    loaded = Acceptance.load(tmp_path / "table.json")
    assert (loaded.k, loaded.source, loaded.siblings.tolist()) == (3, "a test", [1, 2, 4, 8])
    for siblings in (1, 8):
        for position in POSITIONS:
            expected = table.mean_length(siblings, position)
            assert loaded.mean_length(siblings, position) == pytest.approx(expected, abs=0.02)


def test_the_nearest_number_of_siblings_counts(table):
    assert table.level_of(np.array([1, 3, 5, 6, 16, 100])).tolist() == [0, 2, 2, 3, 3, 3]


def test_a_request_draws_the_same_record_at_the_same_position(table):
    arguments = np.zeros(4, np.int64), table.cells
    requests, generated = np.arange(4), np.array([5, 300, 700, 9000])
    first = draw_records(requests, generated, *arguments, 0)
    assert np.array_equal(first, draw_records(requests, generated, *arguments, 0))
    assert np.array_equal(first[::-1], draw_records(requests[::-1].copy(), generated[::-1].copy(), *arguments, 0))
    assert not np.array_equal(first, draw_records(requests, generated, *arguments, 1))


def test_drafts_end_at_the_budget_and_before_what_is_seldom_accepted():
    acceptance = np.array([[0.9, 0.5, 0.2]], np.float32)
    records, drafted = np.zeros(3, np.int64), np.array([3])
    kept, offsets = read_drafts(records, acceptance, drafted, np.array([3, 1, 0]), 0.4)
    assert offsets.tolist() == [0, 2, 3, 3] and kept.tolist() == pytest.approx([0.9, 0.5, 0.9])


def test_verified_tokens_bound_what_is_accepted():
    one = np.array([[(0, 1)] * 7], CELL)
    table = Acceptance(np.array([1]), one, np.full((1, 3), 0.5, np.float32), np.array([3]), np.array([2]))
    drafting = DrawnDrafts(table, np.zeros(4, np.int64))
    drafting.draft(np.arange(4), np.zeros(4, np.int64), np.full(4, 3), 0.0)
    assert drafting.verify(np.array([0, 1, 2, 3])).tolist() == [0, 1, 2, 2]


def test_a_group_counts_by_the_text_it_has_there_at_the_time():
    """A table that accepts as many tokens as its level: 0 alone, 1 with one sibling, 2 with three."""
    cells = np.array([[(level, 1)] * 7 for level in range(3)], CELL)
    acceptance, accepted = np.full((3, 3), 0.5, np.float32), np.array([0, 1, 2])
    table = Acceptance(np.array([1, 2, 4]), cells, acceptance, np.array([3, 3, 3]), accepted)
    here, elsewhere = (GroupDrafts(table, np.array([0, 0, 0, 0, 1])) for _ in range(2))

    def accepts(drafting, request, generated):
        drafting.draft(np.array([request]), np.array([generated]), np.array([3]), 0.0)
        return int(drafting.verify(np.array([3]))[0])

    assert accepts(here, 0, 10) == 0, "nobody else has text yet"
    here.append(np.array([1, 4]), np.array([100, 100]))
    assert accepts(here, 0, 10) == 1
    assert accepts(here, 0, 1000) == 0, "a tenth of its own text is hardly a sibling"
    here.append(np.array([2, 3]), np.array([40, 50]))
    assert accepts(here, 0, 40) == 2
    assert accepts(here, 4, 40) == 0, "another prompt"
    assert accepts(elsewhere, 0, 40) == 0, "another replica"


def test_real_drafts_accept_what_the_text_repeats():
    text = np.tile(np.array([5, 6, 7, 8], np.int32), 5)
    work = recorded_round(Recording([np.array([1], np.int32)], [[text]]))
    drafting = RealDrafts(Drafter(max_draft_tokens=3), work)
    drafting.start(0)
    zero = np.zeros(1, np.int64)
    drafting.append(zero, np.array([6]))
    acceptance, offsets = drafting.draft(zero, np.array([6]), np.array([3]), 0.0)
    assert (len(acceptance), offsets.tolist()) == (3, [0, 3])
    assert drafting.verify(np.array([3])).tolist() == [3]
    drafting.append(zero, np.array([18]))
    drafting.draft(zero, np.array([18]), np.array([3]), 0.0)
    assert drafting.verify(np.array([3])).tolist() == [2]  # the text ends


def test_a_drafter_that_sees_more_samples_has_more_accepted(recording):
    rounds, acceptance = [recorded_round(recording)], Real(partial(make_drafter, "sam"))
    accepted = {}
    for routing, replicas in (("least-loaded", 1), ("least-loaded", 4), ("prompt", 4), ("shared", 4)):
        choice = Choice("always", 3, scope="group", routing=routing)
        outcome, _ = simulate(rounds, Cluster(replicas), choice, linear(10.0, 0.0, 0.1), acceptance, 1)
        assert outcome.tokens == recording.num_tokens
        accepted[routing, replicas] = outcome.accepted
    assert accepted["prompt", 4] == accepted["least-loaded", 1]
    assert accepted["least-loaded", 4] < 0.8 * accepted["least-loaded", 1]
    assert accepted["shared", 4] > 0.9 * accepted["least-loaded", 1]


def test_baselines_draft_in_a_rollout(recording):
    acceptance = Real(partial(make_drafter, "first-occurrence"))
    rounds = [recorded_round(recording)]
    outcome, _ = simulate(rounds, Cluster(), Choice("always", scope="request"), linear(10.0, 0.0, 0.1), acceptance, 1)
    assert outcome.tokens == recording.num_tokens and outcome.accept_length < 1.1


def test_mistakes_are_one_line(tmp_path, capsys):
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(ValueError, match="bad.json: expected a JSON object"):
        Acceptance.load(tmp_path / "bad.json")
    with pytest.raises(ValueError, match="no such file"):
        Acceptance.load(tmp_path / "none.json")
    assert main(["--traces", str(tmp_path / "none.npz"), "--output", str(tmp_path / "out.json")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'none.npz'}: no such file\n"


def test_the_command_writes_a_table(recording, tmp_path, capsys):
    samples = recording.responses[0][:2]
    offsets = np.cumsum([0, *map(len, samples)])
    np.savez(
        tmp_path / "two.npz",
        prompt_tokens=recording.prompts[0], prompt_offsets=np.array([0, 3]), response_tokens=np.concatenate(samples),
        response_offsets=offsets, response_prompt=np.zeros(2, np.int32),
    )  # fmt: skip
    arguments = ["--traces", str(tmp_path / "two.npz"), "--k", "2", "--output", str(tmp_path / "table.json")]
    assert main(arguments) == 0
    assert Acceptance.load(tmp_path / "table.json").k == 2
    assert " 2 siblings, mean acceptance length from position  0: 1." in capsys.readouterr().out
