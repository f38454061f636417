"""Earlier responses to a prompt, appended to its group."""

import numpy as np

from sam.drafting.drafter import Drafter
from tests.sam.stepping import step

PROMPT = np.array([1, 2], np.int32)


def draft(drafter, request, tokens):
    made = step(drafter, [request], np.array(tokens, np.int32), np.array([0, len(tokens)]), np.array([3]))
    return made.token_ids.tolist()


def test_a_request_drafts_from_them():
    drafter = Drafter(max_draft_tokens=3)
    drafter.start("a", PROMPT)
    assert drafter.append_earlier(PROMPT, np.array([7, 8, 9, 10], np.int32))
    assert drafter.append_earlier(PROMPT, np.array([20, 21, 22, 23], np.int32), is_start=False)
    assert draft(drafter, "a", [7]) == [8, 9, 10]
    assert draft(drafter, "a", [20, 21]) == [22, 23]
    drafter.start("b", PROMPT)
    assert drafter.draft(["b"], np.array([1])).token_ids.tolist() == [7], "20 does not follow the prompt"


def test_an_unknown_or_dropped_prompt_is_left_alone():
    drafter = Drafter(max_draft_tokens=3)
    assert not drafter.append_earlier(PROMPT, np.array([7, 8], np.int32))
    drafter.start("a", PROMPT)
    drafter.finish("a")
    assert drafter.append_earlier(PROMPT, np.array([7, 8], np.int32)), "idle, not dropped"
    drafter.groups.evict()
    assert not drafter.append_earlier(PROMPT, np.array([7, 8], np.int32)) and drafter.nbytes == 0


def test_tokens_of_an_idle_group_count_in_its_bound():
    drafter = Drafter(max_draft_tokens=3, scope="history", history_tokens=100)
    for name, prompt in {"a": PROMPT, "b": PROMPT + 5}.items():
        drafter.start(name, prompt)
    drafter.finish("a")
    assert drafter.append_earlier(PROMPT, np.arange(97, dtype=np.int32))  # 99 with the prompt
    assert drafter.counters["evicted_groups"] == 0
    drafter.finish("b")
    assert drafter.counters["evicted_groups"] == 1 and len(drafter.groups) == 1
    drafter.start("c", PROMPT + 5)
    drafter.finish("c")
    assert drafter.groups._idle_tokens == 2


def test_requests_that_run_have_memory_first():
    drafter = Drafter(max_draft_tokens=3, memory_budget_bytes=1 << 20)
    drafter.start("a", PROMPT)
    text, appended = np.arange(256, dtype=np.int32), 0
    while drafter.append_earlier(PROMPT, text):
        appended += 1
    assert appended > 10 and drafter.groups.free_blocks >= len(drafter.store.blocks) // 8
    assert draft(drafter, "a", [0, 1, 2]) == [3, 4, 5] and drafter.counters["overflow_requests"] == 0
