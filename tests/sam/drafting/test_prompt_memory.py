"""The memory of other prompts: what is drafted from it, and what it costs."""

import numpy as np
import pytest

from sam.drafting.drafter import Drafter
from sam.record.responses import Recording
from sam.tools.replay import make_drafter, replay
from tests.sam.stepping import append, draft, tokens

K = 3


def drafter_after(*texts, **arguments):
    """A drafter that has seen (prompt, response) pairs."""
    drafter = Drafter(max_draft_tokens=K, memory_budget_bytes=8 << 20, **arguments)
    for name, (prompt, response) in enumerate(texts):
        drafter.start(str(name), tokens(*prompt))
        append(drafter, {str(name): response})
    return drafter


@pytest.mark.parametrize("other", [((1, 2), range(100, 120)), ((1, 2, *range(100, 120)), (3,))])
def test_boilerplate_of_another_prompt_is_drafted_and_not_without_the_memory(other):
    for cross_prompt, expected in ((True, [106, 107, 108]), (False, [])):
        drafter = drafter_after(other, ((5, 6), range(100, 106)), cross_prompt=cross_prompt)
        assert draft(drafter, "1") == expected


def test_a_draft_goes_from_the_group_to_the_memory_and_back():
    """The group knows 50 51 52 53; the other prompt knows how 52 53 goes on, and the group what comes after that."""
    drafter = drafter_after(((1, 2), (52, 53, 200, 201, 202)), ((5, 6), (202, 30, 31, 32, 50, 51, 52, 53)))
    assert draft(drafter, "1") == [200, 201, 202]
    assert draft(drafter, "1", 200, 201, 202) == [30, 31, 32]


def test_prompts_count_and_not_their_samples():
    """7 followed in three samples of one prompt, 8 in one sample of each of two prompts."""
    seven, eight = (40, 41, 7), (40, 41, 8)
    drafter = drafter_after(*[((1,), seven)] * 3, ((2,), eight), ((3,), eight), ((4,), (40, 41)))
    assert draft(drafter, "5", k=1) == [8]


def test_a_memory_that_misleads_costs_next_to_nothing():
    """Every prompt has a random order of its own in which the same words follow each other."""
    rng, groups = np.random.default_rng(0), []
    for _ in range(12):
        successor, samples = rng.permutation(40), rng.integers(40, size=(4, 250)).astype(np.int32)
        for text, place in np.argwhere(rng.random((4, 249)) < 0.8):
            samples[text, place + 1] = successor[samples[text, place]]
        groups.append(list(samples))
    recording = Recording([tokens(1000 + i) for i in range(12)], groups)

    def length(cross_prompt):
        found = replay(recording, lambda: make_drafter("sam", "group", K, cross_prompt), K)
        return found.summary()["mean_acceptance_length"]

    assert length(True) > 0.99 * length(False)


def test_a_corpus_is_drafted_from_also_by_the_prompt_that_it_answers_and_not_by_groups():
    drafter = drafter_after()
    drafter.read_corpus([(tokens(5, 6), tokens(*range(100, 120)))])
    for prompt in ((5, 6), (1, 2)):
        drafter.start(str(prompt), tokens(*prompt))
        assert draft(drafter, str(prompt), *range(100, 106)) == [106, 107, 108]
    unread = drafter_after(cross_prompt=False)
    unread.read_corpus([(tokens(5, 6), tokens(*range(100, 120)))])
    unread.start("a", tokens(5, 6))
    assert draft(unread, "a", *range(100, 106)) == []
