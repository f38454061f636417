"""What is drafted, for whom, and that nothing stays behind."""

import numpy as np
import pytest

from sam.automaton import store
from sam.corpus import corpus_of, save_corpus
from sam.drafting.drafter import SLOTS, Drafter
from tests.sam.stepping import append, draft, step, tokens

K = 3


def test_most_frequent_continuation_wins_and_ties_go_to_the_latest():
    drafter = Drafter(max_draft_tokens=K)
    for request in ("text", "fresh"):
        drafter.start(request, tokens(0))
    append(drafter, {"fresh": [1], "text": [4, 1, 2, 9, 1, 3, 8, 1, 2, 7]})
    assert draft(drafter, "fresh", k=1) == [2]
    append(drafter, {"text": [1, 3]})
    assert draft(drafter, "fresh", k=1) == [3]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ((0, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 90), [5, 6, 7]),  # 90 stands in the place of 4: on beside it
        ((1, 2, 3, 4), []),  # no context
        ((5, 6, 7, 8, 5, 6), [7, 8, 5, 6]),  # on from a shorter context where the continuation ends
    ],
)
def test_what_a_text_goes_on_with(text, expected):
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


@pytest.mark.parametrize(("scope", "sibling"), [("group", [9, 4]), ("request", [])])
def test_siblings_share_and_other_prompts_do_not(scope, sibling):
    drafter = Drafter(max_draft_tokens=K, cross_prompt=False, scope=scope)
    for request, prompt in {"a": (1, 2), "b": (1, 2), "c": (1, 3)}.items():
        drafter.start(request, tokens(*prompt))
    append(drafter, {"a": [7, 8, 9, 4]})
    assert draft(drafter, "b", 7, 8) == sibling and draft(drafter, "c", 7, 8) == []


def test_a_duplicate_is_drafted_to_its_end_and_its_acceptance_is_learnt():
    drafter = Drafter(max_draft_tokens=8)
    text = np.random.default_rng(0).integers(1000, size=400).astype(np.int32)
    drafter.start("a", tokens(1))
    drafter.start("b", tokens(1))
    append(drafter, {"a": text})
    append(drafter, {"b": text[:8]})
    first = drafter.draft(["b"], np.array([8])).acceptance[0]
    for done in range(8, 392, 8):
        assert draft(drafter, "b", k=8) == text[done : done + 8].tolist()
        append(drafter, {"b": text[done : done + 8]})
    assert first < 0.9 < drafter.draft(["b"], np.array([8])).acceptance[0]


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


def test_history_is_bounded_and_old_policies_leave_first():
    drafter = Drafter(max_draft_tokens=K, scope="history", history_tokens=500)
    for index in range(300):
        request = str(index)
        drafter.start(request, tokens(index, 1, 2), policy_version=1 if index == 7 else 0)
        append(drafter, {request: range(10)})
        drafter.finish(request)
        assert request not in drafter._slots
        assert drafter.groups._idle_tokens <= 500
    assert drafter.counters["evicted_groups"] == 300 - 500 // 13
    for index, found in ((7, True), (8, False), (299, True)):
        assert (drafter.groups.find(tokens(index, 1, 2)) != store.NONE) == found


@pytest.mark.parametrize(("scope", "expected"), [("history", [9, 4]), ("request", [])])
def test_history_drafts_from_an_earlier_step(scope, expected):
    drafter = Drafter(max_draft_tokens=K, scope=scope, history_tokens=1000)
    drafter.start("a", tokens(1, 2))
    append(drafter, {"a": [7, 8, 9, 4]})
    drafter.finish("a")
    drafter.start("a", tokens(1, 2))
    assert draft(drafter, "a", 7, 8) == expected


def test_memory_budget_is_kept_and_the_overflow_gets_no_drafts():
    budget = 1 << 20
    drafter = Drafter(max_draft_tokens=K, memory_budget_bytes=budget)
    for index in range(200):
        drafter.start(str(index), tokens(index, 1, 2, 1, 2))
        append(drafter, {str(index): [1, 2, 3] * 40})
        assert drafter.nbytes <= budget
    assert draft(drafter, "0") != [] and draft(drafter, "199") == [] and drafter.num_tokens("199") == 125
    assert (overflow := drafter.counters["overflow_requests"]) > 0
    for index in range(100):
        drafter.finish(str(index))
    drafter.start("late", tokens(200, 1, 2, 1, 2))
    assert draft(drafter, "late") != [] and drafter.counters["overflow_requests"] == overflow
    for request in [*map(str, range(100, 200)), "late"]:
        drafter.finish(request)
    while drafter.groups.evict():
        pass
    assert drafter.nbytes == len(drafter._slots) == len(drafter.groups) == 0


def test_more_requests_than_slots_at_first():
    drafter = Drafter(max_draft_tokens=K)
    ids = [str(i) for i in range(SLOTS + 10)]
    for i, request in enumerate(ids):
        drafter.start(request, tokens(i % 50, 1, 2, 3, 1, 2))
    assert step(drafter, dict.fromkeys(ids, ()), 1).token_ids.tolist() == [3] * len(ids)


def test_hash_collisions_of_prompts_are_told_apart(monkeypatch):
    monkeypatch.setattr("sam.automaton.prompt_groups.hash", lambda _: 1, raising=False)
    drafter = Drafter(max_draft_tokens=K)
    for request, prompt in {"a": (1, 2), "b": (1, 2, 7), "c": (2, 1), "d": (1, 2)}.items():
        drafter.start(request, tokens(*prompt))
    groups = [drafter._group_of[drafter._slots[request]] for request in "abcd"]
    assert len(set(groups)) == 3 and groups[0] == groups[3]
    append(drafter, {"a": [7, 5]})
    assert drafter.groups.find(tokens(1, 2, 7)) == groups[1]


def test_a_static_corpus_is_drafted_from_where_its_match_is_longer(tmp_path):
    text = np.random.default_rng(0).integers(1000, size=200).astype(np.int32)
    save_corpus(corpus_of([text], len(text)), tmp_path / "corpus.sam")
    with_corpus = Drafter(max_draft_tokens=K, corpus=tmp_path / "corpus.sam", min_extra_match_len=5)
    without = Drafter(max_draft_tokens=K)
    for drafter in (with_corpus, without):
        drafter.start("a", text[50:53])
        assert draft(drafter, "a", *text[53:55]) == []  # the match of 5 is not longer by more than 5
    assert draft(with_corpus, "a", *text[55:60]) == text[60:63].tolist() and draft(without, "a", *text[55:60]) == []
    assert draft(with_corpus, "a", 5000) == []


def test_bad_settings_and_requests():
    for arguments, message in (({"max_draft_tokens": 0}, "ens=0"), ({"max_draft_tokens": 1, "scope": "x"}, "e='x'")):
        with pytest.raises(ValueError, match=message):
            Drafter(**arguments)
    drafter = Drafter(max_draft_tokens=K)
    with pytest.raises(ValueError, match="at least one token"):
        drafter.start("a", tokens())
    for bad in ([1, -1], [2**31], [0.5]):
        with pytest.raises(ValueError, match="expected token ids"):
            drafter.start("a", np.array(bad))
    with pytest.raises(ValueError, match="do not fit into memory_budget_bytes"):
        Drafter(max_draft_tokens=K, memory_budget_bytes=1 << 16).start("a", np.zeros(10_000, np.int32))
    drafter.start("a", tokens(1))
    with pytest.raises(ValueError, match="followed already"):
        drafter.start("a", tokens(1))
    with pytest.raises(ValueError, match="'b' is not followed"):
        append(drafter, {"b": [1]})
    with pytest.raises(ValueError, match="expected token ids"):
        append(drafter, {"a": [-1]})
    for offsets in ([0], [0, 3], [1, 2], [0, 3, 2]):
        with pytest.raises(ValueError, match="rising from 0 to 2"):
            drafter.append(["a"] * max(1, len(offsets) - 1), tokens(1, 2), np.array(offsets))
    with pytest.raises(ValueError, match="2 budgets for 1 requests"):
        drafter.draft(["a"], np.array([1, 1]))
    assert drafter.num_tokens("a") == 1
    drafter.finish("a")
    for late in (lambda: draft(drafter, "a", 1), lambda: drafter.finish("a"), lambda: drafter.lengths(["a"])):
        with pytest.raises(ValueError, match="'a' is not followed"):
            late()


def test_drafts_end_where_they_are_unlikely_to_be_accepted():
    drafter = Drafter(max_draft_tokens=4)
    drafter.start("a", tokens(1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 3, 7, 1))
    whole = drafter.draft(["a"], np.array([4], dtype=np.int32))
    assert len(whole.token_ids) == 4 and (np.diff(whole.acceptance) < 0).all()
    for kept in range(5):
        floor = float(whole.acceptance[kept]) + 1e-6 if kept < 4 else 0.0
        cut = step(drafter, {"a": []}, 4, min_acceptance=floor)
        assert cut.token_ids.tolist() == whole.token_ids[:kept].tolist()


def test_earlier_responses_to_a_prompt_are_drafted_from():
    prompt, drafter = tokens(1, 2), Drafter(max_draft_tokens=K)
    assert not drafter.append_earlier(prompt, tokens(7, 8)), "no such group"
    drafter.start("a", prompt)
    assert drafter.append_earlier(prompt, tokens(7, 8, 9, 10))
    assert drafter.append_earlier(prompt, tokens(20, 21, 22, 23), is_start=False)
    assert draft(drafter, "a", 7) == [8, 9, 10] and draft(drafter, "a", 20, 21) == [22, 23]
    drafter.start("b", prompt)
    assert draft(drafter, "b", k=1) == [7], "20 does not follow the prompt"
    for request in "ab":
        drafter.finish(request)
    assert drafter.append_earlier(prompt, tokens(7, 8)), "idle, not dropped"
    drafter.groups.evict()
    assert not drafter.append_earlier(prompt, tokens(7, 8)) and drafter.nbytes == 0


def test_tokens_of_an_idle_group_count_in_its_bound():
    drafter = Drafter(max_draft_tokens=K, scope="history", history_tokens=100)
    for name, prompt in {"a": tokens(1, 2), "b": tokens(6, 7)}.items():
        drafter.start(name, prompt)
    drafter.finish("a")
    assert drafter.append_earlier(tokens(1, 2), np.arange(97, dtype=np.int32))  # 99 with the prompt
    assert drafter.counters["evicted_groups"] == 0
    drafter.finish("b")
    assert drafter.counters["evicted_groups"] == 1 and len(drafter.groups) == 1


def test_requests_that_run_have_memory_first():
    drafter, prompt = Drafter(max_draft_tokens=K, memory_budget_bytes=1 << 20), tokens(1, 2)
    drafter.start("a", prompt)
    text, appended = np.arange(256, dtype=np.int32), 0
    while drafter.append_earlier(prompt, text):
        appended += 1
    assert appended > 10 and drafter.groups.free_blocks >= len(drafter.store.blocks) // 8
    assert draft(drafter, "a", 0, 1, 2) == [3, 4, 5] and drafter.counters["overflow_requests"] == 0
