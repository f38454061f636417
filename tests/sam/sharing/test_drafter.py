"""Drafts from siblings elsewhere: the text that counts, and no memory left behind."""

import numpy as np
import pytest

from sam.automaton.store import BLOCK_BYTES
from sam.drafting.drafter import Drafter
from sam.sharing.drafter import COUNT_EVERY, SharingDrafter
from tests.sam.brute_force import check_blocks
from tests.sam.drafting.test_torn_groups import SAMPLES, Samples
from tests.sam.sharing.channel import make_groups, tokens
from tests.sam.sharing.replicas import K, Replicas, step


def test_a_sibling_elsewhere_is_drafted_from_as_one_here():
    replicas = Replicas()
    here, there = replicas.drafters
    here.start("a", tokens(1, 2))
    there.start("b", tokens(1, 2))
    step(there, "b", 7, 8, 9, 5)
    assert step(here, "a", 7) == []
    replicas.exchange()
    assert step(here, "a", 8) == [9, 5]
    alone = Drafter(max_draft_tokens=K)
    for request in ("a", "b"):
        alone.start(request, tokens(1, 2))
    step(alone, "b", 7, 8, 9, 5)
    step(alone, "a", 7)
    assert step(alone, "a", 8) == [9, 5]


def test_other_prompts_are_kept_apart_and_nobody_gets_its_own_text():
    replicas = Replicas()
    here, there = replicas.drafters
    here.start("a", tokens(1, 2))
    there.start("b", tokens(1, 3))
    step(there, "b", 7, 8, 9)
    step(here, "a", 7, 8)
    replicas.exchange()
    before = int(here.store.groups["num_tokens"].sum())
    assert step(here, "a", 7) == [8, 7, 8]  # its own
    assert int(here.store.groups["num_tokens"].sum()) == before + 1


def test_siblings_at_draft_time_are_counted():
    replicas = Replicas()
    here, there = replicas.drafters
    for request in ("a", "b"):
        here.start(request, tokens(1, 2))
    there.start("c", tokens(1, 2))
    step(there, "c", 7)
    replicas.exchange()
    step(here, "a", 7)
    counters = here.counters
    assert [counters[name] for name in ("drafted_requests", "siblings_here", "siblings_elsewhere")] == [1, 1, 1]
    for _ in range(COUNT_EVERY - 1):
        step(here, "a", 7)
    assert counters["drafted_requests"] == 1, "every eighth step"
    step(here, "a", 7, budget=0)
    assert counters["drafted_requests"] == 1
    for _ in range(COUNT_EVERY):
        step(here, "a", 7)
    assert counters["drafted_requests"] == 2
    assert counters["sharing_received_tokens"] == 1


def test_lag_is_what_a_request_here_wrote_since_the_question():
    replicas = Replicas()
    here, there = replicas.drafters
    for request in ("a", "c"):
        here.start(request, tokens(1, 2))
    there.start("b", tokens(1, 2))
    step(there, "b", 7)
    step(here, "a", 4, 4, 4, 4)
    both = tokens(5, 5, 5, 6, 6)
    written = iter([lambda: here.step(["a", "c"], both, np.array([0, 3, 5]), np.zeros(2, np.int32))])

    def write_once():
        replicas.channel.clock.now += 0.01
        next(written, lambda: None)()

    there.client.exchange()
    replicas.channel.between = write_once
    here.client.exchange()
    assert here.counters["sharing_lag_tokens"] == 2  # 2.5, rounded to even
    step(there, "b", 8)
    there.client.exchange()
    written = iter([lambda: step(here, "a", 9, 9, 9, 9)])
    here.client.exchange()
    assert here.counters["sharing_lag_tokens"] == 4


@pytest.mark.parametrize("prompt_tokens", [2, 20])
def test_text_from_elsewhere_teaches_what_text_from_here_does(prompt_tokens):
    """Step by step the same drafts as with the sibling here; and the weights, and the memory of other prompts."""
    rng = np.random.default_rng(0)
    replicas, alone = Replicas(), Drafter(max_draft_tokens=K)
    here, there = replicas.drafters
    phrases = rng.integers(0, 50, (12, 6)).astype(np.int32)
    drafted, arrived = 0, 0
    for number in range(4):
        prompt = np.append(rng.integers(0, 50, prompt_tokens - 1), number).astype(np.int32)
        for drafter, request in ((here, "a"), (there, "b"), (alone, "a"), (alone, "b")):
            drafter.start(request, prompt)
        for _ in range(40):
            own, other = (phrases[rng.integers(12)][: rng.integers(1, 7)] for _ in "ab")
            there.step(["b"], other, np.array([0, len(other)]), np.zeros(1, np.int32))
            replicas.exchange()
            found = here.step(["a"], own, np.array([0, len(own)]), np.array([K]))
            for request, text in (("b", other), ("a", own)):
                alone.append([request], text, np.array([0, len(text)]))
            expected = alone.draft(["a"], np.array([K]))
            assert found.token_ids.tolist() == expected.token_ids.tolist()
            assert found.acceptance.tolist() == expected.acceptance.tolist()
            drafted, arrived = drafted + len(found.token_ids), arrived + len(other)
            assert here.counters["sharing_received_tokens"] == arrived
        for drafter, request in ((here, "a"), (there, "b"), (alone, "a"), (alone, "b")):
            drafter.finish(request)
    assert drafted > 300
    learned, memories = (here.learned, alone.learned), (here.memory, alone.memory)
    assert learned[0].mixing.tobytes() == learned[1].mixing.tobytes()
    assert memories[0].entries.tobytes() == memories[1].entries.tobytes()


def test_a_group_that_is_dropped_gives_back_slots_numbers_and_blocks():
    replicas = Replicas(memory_budget_bytes=1 << 20)
    here, there = replicas.drafters
    slots = len(here._free_slots)
    for i in range(30):
        for name, drafter in (("a", here), ("b", there)):
            drafter.start(name, tokens(i))
            step(drafter, name, *range(40))
        replicas.exchange()
        for name, drafter in (("a", here), ("b", there)):
            step(drafter, name, 1)
            drafter.finish(name)
        while here.groups.evict():
            pass
        while there.groups.evict():
            pass
        replicas.exchange()
    assert len(here._free_slots) == slots and here.nbytes == 0
    assert here._sibling_slots == here._numbers == here._keys == here._group_of_key == {}
    assert not here._siblings_here.any() and not here._siblings_elsewhere.any()
    assert here.client.view.groups == [{}] and here.client.view._highest <= 2


def test_a_group_that_waits_idle_is_not_written_twice():
    replicas = Replicas()
    here, there = replicas.drafters
    there.start("b", tokens(1))
    step(there, "b", 7, 8, 9)
    for request in ("a", "c"):
        here.start(request, tokens(1))
        step(here, request, 4)
        replicas.exchange()
        step(here, request, 5)
        here.finish(request)
    assert int(here.store.groups["num_tokens"].sum()) == 1 + 2 * 2 + 3


@pytest.mark.parametrize("seed", range(3))
def test_fuzz_under_memory_pressure_and_outages(seed):
    """Drafts are tokens that were written, memory is given back, and nothing raises, whatever the channel does."""
    rng = np.random.default_rng(seed)
    replicas = Replicas(3, memory_budget_bytes=80_000 * (1 + seed), scope="history", history_tokens=300)
    running, number = [[] for _ in replicas.drafters], 0
    for _ in range(1500):
        which = int(rng.integers(3))
        drafter, mine = replicas.drafters[which], running[which]
        choice = int(rng.integers(20))
        if choice == 0 or not mine:
            number += 1
            mine.append(str(number))
            drafter.start(mine[-1], tokens(*[int(rng.integers(4))] * 3))
        elif choice == 1:
            drafter.finish(mine.pop(int(rng.integers(len(mine)))))
        elif choice == 2:
            replicas.channel.is_down, replicas.channel.is_frozen = rng.random(2) < 0.2
        elif choice == 3:
            replicas.channel.groups[0] = make_groups(budget=int(rng.integers(4_000, 20_000)), ttl=30.0)
        elif choice < 8:
            replicas.exchange(1, seconds=1.0)
        else:
            counts = rng.integers(0, 4, size=len(mine))
            text = rng.integers(5, size=int(counts.sum())).astype(np.int32)
            offsets = np.concatenate([[0], np.cumsum(counts)])
            drafts = drafter.step(mine, text, offsets, np.full(len(mine), K))
            assert np.isin(drafts.token_ids, range(5)).all()
            assert (np.diff(drafts.offsets) <= K).all()
    for drafter, mine in zip(replicas.drafters, running, strict=True):
        assert drafter.counters["sharing_received_tokens"] > 0
        check_blocks(drafter.store, list(drafter.groups._hash))
        for request in mine:
            drafter.finish(request)
        while drafter.groups.evict():
            pass
        assert drafter.nbytes == 0 and drafter.groups._idle_tokens == 0 and not drafter._sibling_slots
        assert len(drafter._free_slots) == len(drafter.sequences.texts) - 1


def test_a_group_that_memory_is_too_short_for_is_left_by_its_siblings_too():
    """As in tests/sam/drafting/test_torn_groups.py; every request is finished once for the others."""
    torn = 0
    for seed in range(10):
        drafter = SharingDrafter(max_draft_tokens=3, cross_prompt=False, memory_budget_bytes=8 * BLOCK_BYTES)
        client = RecordingClient()
        drafter.share(client)
        samples = Samples(drafter, seed)
        samples.write("a")
        torn += samples.errors > 0
        names = [name for name, *_ in client.events]
        assert names.count("start") == names.count("finish") == len(SAMPLES)
        assert (drafter._siblings_here >= 0).all() and drafter.nbytes == 0 or samples.errors == 0
        check_blocks(drafter.store, list(drafter.groups._hash))
    assert torn == 10


class RecordingClient:
    """Takes what a drafter tells, and answers nothing."""

    def __init__(self):
        self.counters, self.events = {}, []

    def put(self, *event):
        self.events.append(event)

    def now(self):
        return 0.0
