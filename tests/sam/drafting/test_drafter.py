"""What is drafted, for whom, and that nothing stays behind."""

import numpy as np
import pytest

from sam.automaton import store
from sam.drafting.drafter import SLOTS, Drafter
from tests.sam.stepping import append, draft, step, tokens

K = 3


def test_what_a_text_goes_on_with():
    for text, expected in (
        ((0, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 90), [5, 6, 7]),  # 90 stands in the place of 4: on beside it
        ((1, 2, 3, 4), []),  # no context
        ((5, 6, 7, 8, 5, 6), [7, 8, 5, 6]),  # on from a shorter context where the continuation ends
    ):
        drafter = Drafter(max_draft_tokens=4)
        drafter.start("a", tokens(*text[:1]))
        assert draft(drafter, "a", *text[1:], k=len(expected) or K) == expected


@pytest.mark.parametrize(("scope", "known"), [("group", 3), ("request", 0)])
def test_the_next_turn_goes_on_where_the_last_one_ended(scope, known):
    """The automaton has the turn before once, and what a tool answered, 8 and 9, is text as any other."""
    drafter = Drafter(max_draft_tokens=K, scope=scope)
    drafter.start("first", tokens(1, 2))
    append(drafter, {"first": [3, 4, 5]})
    drafter.finish("first")
    drafter.start("second", tokens(1, 2), given=(given := tokens(3, 4, 5, 8, 9)))
    assert drafter.num_tokens("second") == 2 + known
    append(drafter, {"second": [*given[known:], 3, 4]})
    assert drafter.store.groups["num_tokens"].sum() == 9 and draft(drafter, "second") == [5, 8, 9]


def test_where_nothing_repeats_few_drafts_are_believed_in_and_many_once_text_repeats():
    rng, drafter = np.random.default_rng(0), Drafter(max_draft_tokens=4)

    def acceptance(tokens):
        """Of every draft that is made while the request goes on with them, one a step."""
        return np.concatenate([step(drafter, {"a": [token]}, 4).acceptance for token in tokens])

    drafter.start("a", rng.integers(0, 200, 50).astype(np.int32))
    random = acceptance(rng.integers(0, 200, 2000))
    assert len(random) > 2000 and random.sum() < 40
    assert np.count_nonzero(random[len(random) // 2 :] > 0.1) <= 5
    assert np.mean(acceptance(np.tile(rng.integers(0, 200, 50), 20))[-400:]) > 0.9


def test_drafts_end_where_they_are_unlikely_to_be_accepted():
    drafter = Drafter(max_draft_tokens=4)
    drafter.start("a", tokens(1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 7, 1))
    whole = drafter.draft(["a"], np.array([4], dtype=np.int32))
    assert len(whole.token_ids) == 4 and (np.diff(whole.acceptance) < 0).all()
    for kept in range(5):
        floor = float(whole.acceptance[kept]) + 1e-6 if kept < 4 else 0.0
        cut = step(drafter, {"a": []}, 4, min_acceptance=floor)
        assert cut.token_ids.tolist() == whole.token_ids[:kept].tolist()


@pytest.mark.parametrize(("scope", "sibling"), [("request", []), ("group", [8, 9, 4]), ("history", [8, 9, 4])])
def test_whose_text_is_drafted_from(scope, sibling):
    drafter = Drafter(max_draft_tokens=K, cross_prompt=False, scope=scope, history_tokens=1000)
    for request, prompt in {"a": (1, 2), "b": (1, 2), "c": (1, 3)}.items():
        drafter.start(request, tokens(*prompt))
    append(drafter, {"a": [7, 8, 9, 4]})
    assert draft(drafter, "c", 7, 8) == [] and draft(drafter, "b", 7) == sibling
    for request in "abc":
        drafter.finish(request)
    drafter.start("later", tokens(1, 2))
    assert draft(drafter, "later", 7) == sibling


def test_idle_groups_are_bounded_and_those_idle_for_longest_leave_first():
    drafter = Drafter(max_draft_tokens=K, scope="history", history_tokens=500)
    for index in range(300):
        drafter.start(str(index), tokens(index, 1, 2))
        append(drafter, {str(index): range(10)})
        drafter.finish(str(index))
    assert drafter.counters["evicted_groups"] == 300 - 500 // 13
    held = [index for index in range(300) if drafter.groups.find(tokens(index, 1, 2)) != store.NONE]
    assert held == list(range(300 - 500 // 13, 300))
    assert drafter.append_earlier(tokens(299, 1, 2), tokens(*range(100)))
    assert len(drafter.groups) < 500 // 13 - 5, "what is added to an idle group counts"


def test_more_requests_than_slots_at_first():
    drafter = Drafter(max_draft_tokens=K)
    ids = [str(i) for i in range(SLOTS + 10)]
    for i, request in enumerate(ids):
        drafter.start(request, tokens(i % 50, 1, 2, 3, 1, 2))
    assert step(drafter, dict.fromkeys(ids, ()), 1).token_ids.tolist() == [3] * len(ids)


def test_what_cannot_be_is_refused_and_changes_nothing():
    drafter = Drafter(max_draft_tokens=K, memory_budget_bytes=1 << 20)
    drafter.start("a", tokens(1))
    with pytest.raises(ValueError, match="do not fit into memory_budget_bytes"):
        drafter.start("b", np.zeros(30_000, np.int32))
    with pytest.raises(ValueError, match="'b' is not followed"):
        append(drafter, {"b": [1]})
    with pytest.raises(ValueError, match="append: expected token ids"):
        append(drafter, {"a": [1, -1]})
    assert drafter.num_tokens("a") == 1
