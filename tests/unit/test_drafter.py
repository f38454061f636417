"""What is drafted, for whom, and that nothing stays behind."""

import numpy as np
import pytest

from sam.drafter import Drafter

K = 3


def tokens(*values):
    return np.array(values, dtype=np.int32)


def draft(drafter, request, k=K):
    return drafter.draft([request], np.array([k], dtype=np.int32)).token_ids.tolist()


def append(drafter, request, *values):
    drafter.append([request], tokens(*values), np.array([0, len(values)]))


def test_most_frequent_continuation_wins_and_ties_go_to_the_latest():
    drafter = Drafter(max_draft_tokens=1)
    drafter.start("a", tokens(1, 2, 9, 1, 3, 8, 1, 2, 7, 1))
    assert draft(drafter, "a") == [2]
    append(drafter, "a", 3, 6, 1)
    assert draft(drafter, "a") == [3]


def test_draft_goes_on_from_a_shorter_context_where_the_continuation_ends():
    drafter = Drafter(max_draft_tokens=4)
    drafter.start("a", tokens(5, 6, 7, 8, 5, 6))
    assert draft(drafter, "a", 4) == [7, 8, 5, 6]


def test_siblings_share_and_other_prompts_do_not():
    drafter = Drafter(max_draft_tokens=K)
    for request, prompt in {"a": (1, 2), "b": (1, 2), "c": (1, 3)}.items():
        drafter.start(request, tokens(*prompt))
    append(drafter, "a", 7, 8, 9, 4)
    for request in ("b", "c"):
        append(drafter, request, 7, 8)
    assert draft(drafter, "b") == [9, 4]
    assert draft(drafter, "c") == []


def test_scope_request_shares_nothing():
    drafter = Drafter(max_draft_tokens=K, scope="request")
    drafter.start("a", tokens(1, 2))
    drafter.start("b", tokens(1, 2))
    append(drafter, "a", 7, 8, 9)
    append(drafter, "b", 7, 8)
    assert draft(drafter, "b") == []


def test_batched_step_is_append_then_draft():
    one, other = Drafter(max_draft_tokens=K), Drafter(max_draft_tokens=K)
    rng = np.random.default_rng(0)
    ids = [f"{prompt}/{sample}" for prompt in range(3) for sample in range(4)]
    for drafter in (one, other):
        for request in ids:
            drafter.start(request, tokens(int(request[0]), 1, 2))
    for _ in range(50):
        lengths = rng.integers(0, 3, len(ids))
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        new = rng.integers(0, 4, offsets[-1]).astype(np.int32)
        budgets = rng.integers(0, K + 1, len(ids)).astype(np.int32)
        together = one.step(ids, new, offsets, budgets)
        other.append(ids, new, offsets)
        apart = other.draft(ids, budgets)
        assert together.token_ids.tolist() == apart.token_ids.tolist()
        assert together.offsets.tolist() == apart.offsets.tolist()
        assert (np.diff(together.offsets) <= budgets).all()
        assert ((together.survival > 0) & (together.survival <= 1)).all()


def test_finished_requests_leave_and_idle_groups_are_bounded():
    drafter = Drafter(max_draft_tokens=K, scope="history", history_tokens=500)
    for index in range(300):
        request = str(index)
        drafter.start(request, tokens(index, 1, 2))
        append(drafter, request, *range(10))
        (drafter.finish if index % 2 else drafter.abort)(request)
        assert request not in drafter
        assert sum(group.tokens for group in drafter._groups.values()) <= 500
    assert drafter.counters["evicted_groups"] > 200


def test_memory_budget_is_kept_and_the_overflow_gets_no_drafts():
    budget = 1 << 20
    drafter = Drafter(max_draft_tokens=K, memory_budget_bytes=budget)
    for index in range(200):
        drafter.start(str(index), tokens(index, 1, 2, 1, 2))
        append(drafter, str(index), *([1, 2, 3] * 40))
        assert drafter.nbytes <= budget
    assert draft(drafter, "0") != []
    assert draft(drafter, "199") == []
    assert drafter.num_tokens("199") == 125
    assert drafter.counters["overflow_requests"] > 0
    for index in range(200):
        drafter.finish(str(index))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"max_draft_tokens": 0}, "max_draft_tokens=0"),
        ({"max_draft_tokens": 1, "scope": "all"}, "scope='all'"),
    ],
)
def test_bad_settings(arguments, message):
    with pytest.raises(ValueError, match=message):
        Drafter(**arguments)


def test_bad_requests():
    drafter = Drafter(max_draft_tokens=K)
    with pytest.raises(ValueError, match="at least one token"):
        drafter.start("a", tokens())
    with pytest.raises(ValueError, match="none negative"):
        drafter.start("a", tokens(1, -1))
    drafter.start("a", tokens(1))
    with pytest.raises(ValueError, match="followed already"):
        drafter.start("a", tokens(1))
    with pytest.raises(KeyError):
        append(drafter, "b", 1)


def test_drafts_end_where_they_are_unlikely_to_survive():
    drafter = Drafter(max_draft_tokens=4)
    drafter.start("a", tokens(1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 7, 1))
    whole = drafter.draft(["a"], np.array([4], dtype=np.int32))
    assert len(whole.token_ids) == 4 and (np.diff(whole.survival) < 0).all()
    for kept in range(5):
        floor = float(whole.survival[kept]) + 1e-6 if kept < 4 else 0.0
        cut = drafter.step(["a"], tokens(), np.zeros(2, np.int64), np.array([4], np.int32), min_survival=floor)
        assert cut.token_ids.tolist() == whole.token_ids[:kept].tolist()
