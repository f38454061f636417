"""The memory of other prompts: what it counts, what it forgets, and what it is worth."""

from functools import partial

import numpy as np
import pytest

from sam.drafting import prompt_memory
from sam.drafting.drafter import Drafter
from sam.drafting.prompt_memory import CANDIDATES, CLOCK_TOKENS, ORDERS, make_memory, recall, remember
from sam.drafting.texts import RECENT_TOKENS, make_sequences, start_sequence
from sam.record.responses import Recording
from sam.replay import make_drafter, replay
from tests.sam.stepping import append, draft, tokens

K = 3


class Texts:
    """A memory, and texts that are written into it, each with a slot of its own."""

    def __init__(self, slots=4, budget=1 << 20):
        self.memory, self.sequences = make_memory(budget), make_sequences(slots, K)

    def start(self, slot, prompt_tag, prompt=()):
        start_sequence(self.sequences, slot, 0, 0, tokens(*prompt), prompt_tag)

    def write(self, slot, *values):
        for value in values:
            remember(self.memory, self.sequences, slot, value)
            position = self.sequences.texts[slot]["num_tokens"]
            self.sequences.recent_tokens[slot, position % RECENT_TOKENS] = value
            self.sequences.texts[slot]["num_tokens"] += 1

    def recall(self, slot, ahead=0):
        """Order of the context, and the prompts that each token followed in."""
        found = recall(self.memory, self.sequences, slot, ahead)
        counted = {token: n for token, n in zip(found.tokens, found.counts, strict=True) if n}
        assert sum(counted.values()) == found.total
        return (ORDERS[found.strength], counted) if found.total else None


def test_new_weights_halve_what_a_context_counted_when_they_write_to_it():
    texts = Texts()
    for prompt_tag in range(8):
        texts.start(0, prompt_tag)
        texts.write(0, 1, 2, 3)
    texts.memory.state["policy_version"] = 1
    texts.start(0, 100)
    texts.write(0, 1, 2)
    assert texts.recall(0) == (2, {3: 8})
    texts.write(0, 4)
    texts.start(0, 101)
    texts.write(0, 1, 2)
    assert texts.recall(0) == (2, {3: 4, 4: 1})


def test_random_texts_against_a_dictionary():
    """A table that is large enough forgets only the rarest of more than CANDIDATES tokens."""
    rng, texts, truth = np.random.default_rng(0), Texts(slots=6, budget=8 << 20), {}
    written = [[] for _ in range(6)]
    for slot in range(6):
        texts.start(slot, slot // 2)
    for _ in range(3000):
        slot, token = int(rng.integers(6)), int(rng.integers(4))
        text, tag = written[slot], slot // 2
        expected = None
        for order in ORDERS:
            followed = truth.get((order, *text[-order:]), []) if len(text) >= order else []
            counted = {t: n - (last == tag) for t, n, last in followed if n - (last == tag) > 0}
            expected = (order, counted) if counted else expected
        assert texts.recall(slot) == expected
        for order in ORDERS:
            if len(text) >= order:
                _count_in(truth.setdefault((order, *text[-order:]), []), token, tag)
        texts.write(slot, token)
        text.append(token)


def _count_in(followed, token, tag):
    for i, (known, count, last) in enumerate(followed):
        if known == token:
            followed[i] = known, count + (last != tag), tag
            return
    if len(followed) < CANDIDATES:
        followed.append((token, 1, tag))
    else:
        rarest = min(range(CANDIDATES), key=lambda i: followed[i][1])
        followed[rarest] = token, 1, tag


def test_memory_is_bounded_and_what_was_not_seen_for_longest_goes():
    texts = Texts(budget=200 << 10)
    assert texts.memory.entries.nbytes == 128 << 10 and texts.memory.entries.ctypes.data % 64 == 0
    rng = np.random.default_rng(0)
    old, kept, new = (rng.integers(0, 1 << 30, 20) for _ in range(3))
    for round_number in range(6):
        texts.start(0, round_number)
        for text in (old, kept) if round_number == 0 else (kept,):
            texts.write(0, *text)
        texts.write(0, *rng.integers(0, 1 << 30, CLOCK_TOKENS))
    texts.write(0, *new)
    known = []
    for text in (old, kept, new):
        texts.start(1, 100)
        texts.write(1, *text[:-1])
        known.append(texts.recall(1) is not None)
    assert known == [False, True, True]


def drafter_after(texts, cross_prompt=True, **arguments):
    """A drafter that has seen (prompt, response) pairs, each of another prompt."""
    drafter = Drafter(max_draft_tokens=K, memory_budget_bytes=8 << 20, cross_prompt=cross_prompt, **arguments)
    for name, (prompt, response) in enumerate(texts):
        drafter.start(str(name), tokens(*prompt))
        append(drafter, {str(name): response})
    return drafter


@pytest.mark.parametrize("boilerplate_in", ["response", "prompt"])
def test_boilerplate_of_another_prompt_is_drafted_and_not_without_the_memory(boilerplate_in):
    boilerplate = range(100, 120)
    other = ((1, 2), boilerplate) if boilerplate_in == "response" else ((1, 2, *boilerplate), (3,))
    for cross_prompt, expected in ((True, [106, 107, 108]), (False, [])):
        drafter = drafter_after([other, ((5, 6), range(100, 106))], cross_prompt)
        assert draft(drafter, "1") == expected


def test_a_draft_goes_from_the_group_to_the_memory_and_back():
    """The group knows 50 51 52 53; the other prompt knows how 52 53 goes on, and the group what comes after that."""
    drafter = drafter_after([((1, 2), (52, 53, 200, 201, 202)), ((5, 6), (202, 30, 31, 32, 50, 51, 52, 53))])
    assert draft(drafter, "1") == [200, 201, 202]
    assert draft(drafter, "1", 200, 201, 202) == [30, 31, 32]


def test_the_memory_is_within_the_budget():
    budget = 4 << 20
    drafter = Drafter(max_draft_tokens=K, memory_budget_bytes=budget)
    held = drafter.memory.entries.nbytes
    assert held == budget // prompt_memory.BUDGET_SHARE
    drafter.start("a", tokens(*range(1000)))
    while drafter.counters["overflow_requests"] == 0:
        append(drafter, {"a": range(1000)})
    assert 0.9 * budget < drafter.nbytes + drafter.memory.entries.nbytes <= budget
    assert drafter.memory.entries.nbytes == held
    assert make_memory(63).entries.size == 0, "a budget for less than two rows is no memory"
    without = Drafter(max_draft_tokens=K, memory_budget_bytes=budget, cross_prompt=False)
    assert without.memory.entries.nbytes == 0 and len(without.store.blocks) > len(drafter.store.blocks)


def mean_acceptance_length(recording, cross_prompt):
    make = partial(make_drafter, "sam", "group", K, cross_prompt=cross_prompt)
    return replay(recording, make, K).summary()["mean_acceptance_length"]


def test_a_memory_that_misleads_costs_next_to_nothing():
    """Every prompt has a random order of its own in which the same words follow each other."""
    rng = np.random.default_rng(0)
    groups = []
    for _ in range(12):
        successor = rng.permutation(40)
        samples = []
        for _ in range(4):
            text = [int(rng.integers(40))]
            while len(text) < 250:
                text.append(int(successor[text[-1]] if rng.random() < 0.8 else rng.integers(40)))
            samples.append(tokens(*text))
        groups.append(samples)
    recording = Recording([tokens(1000 + i) for i in range(12)], groups)
    assert mean_acceptance_length(recording, True) > 0.99 * mean_acceptance_length(recording, False)
