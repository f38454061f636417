"""Several paths: a tree with one leaf is the product's draft, and no path is counted that the text did not take."""

import numpy as np
import pytest

from sam.drafting.drafter import Drafter
from sam.drafting.mixing_weights import make_learned
from sam.drafting.prompt_memory import make_memory
from sam.record.responses import Recording
from sam.replay.paths import play_group, product_memory
from sam.replay.round_robin import Replay, replay, replay_group

PROMPT = np.array([1, 2, 3], np.int32)


def texts(seed, count, length, tokens=6):
    """Text that often has two continuations."""
    rng = np.random.default_rng(seed)
    jumps = [np.where(rng.random(length) < 0.7, 1, rng.integers(1, 3, length)) for _ in range(count)]
    return [(np.cumsum(jump) % tokens + 1).astype(np.int32) for jump in jumps]


class Advances(Replay):
    """Notes each step: its position, drafted, accepted and advanced tokens."""

    def __init__(self):
        super().__init__(4)
        self.rows = []

    def count(self, position, acceptance, accepted, advanced):
        super().count(position, acceptance, accepted, advanced)
        self.rows.append((position, len(acceptance), accepted, advanced, *acceptance))


@pytest.mark.parametrize("cross_prompt", [True, False])
def test_one_path_is_what_the_product_drafts(cross_prompt):
    """Step by step, over three prompts, with and without the memory of other prompts."""
    drafter, result = Drafter(max_draft_tokens=4, cross_prompt=cross_prompt), Advances()
    learned, memory, rows = make_learned(), product_memory(cross_prompt), []
    for seed in range(3):
        prompt, (text,) = np.arange(1, 4 + seed, dtype=np.int32), texts(seed, 1, 300, tokens=30)
        replay_group(result, [drafter], str(seed), prompt, [text], "turns")
        steps = play_group(learned, memory, prompt, [], [text], (1, 4, 4))
        for i, length in enumerate(steps.lengths[:, 0].tolist()):
            counts = steps.position[i], length, steps.accepted[i, 0], steps.advanced[i]
            rows.append((*map(int, counts), *steps.acceptance[i, 0, :length]))
    assert rows == result.rows


def test_another_prompts_continuation_is_a_path():
    """The text's own last two tokens were never continued in the group, but twofold in other prompts."""
    learned, memory = make_learned(), make_memory(1 << 20)
    for number, following in enumerate((8, 9)):
        sample = np.array([6, 7, following], np.int32)
        play_group(learned, memory, PROMPT + 20 * number, [], [sample], (1, 1, 1))
    steps = play_group(learned, memory, PROMPT, [], [np.array([6, 7, 9], np.int32)], (2, 2, 1))
    assert steps.lengths[-1].tolist() == [1, 1]
    alone = play_group(make_learned(), make_memory(0), PROMPT, [], [np.array([6, 7, 9], np.int32)], (2, 2, 1))
    assert alone.lengths[-1].tolist() == [0, 0]


@pytest.mark.parametrize(("at_once", "order"), [(False, "turns"), (True, "engine")])
def test_turns_and_at_once_are_the_orders_of_replay(at_once, order):
    samples = texts(1, 4, 300)
    steps = play_group(make_learned(), product_memory(), PROMPT, [], samples, (1, 3, 3), at_once)
    result = replay(Recording([PROMPT], [samples]), lambda: Drafter(max_draft_tokens=3), 3, order=order)
    assert (len(steps.advanced), int(steps.accepted.sum())) == (result.steps, result.accepted)


@pytest.mark.parametrize(("paths", "most_tokens", "depth"), [(4, 12, 3), (2, 5, 3)])
def test_what_is_accepted_is_the_path_that_the_text_took(paths, most_tokens, depth):
    sample = texts(3, 1, 400)[0]
    steps = play_group(make_learned(), product_memory(), PROMPT, [], [sample], (paths, most_tokens, depth))
    assert steps.lengths.max() <= depth and (steps.lengths - steps.shared).sum(axis=1).max() <= most_tokens
    end = steps.position + steps.advanced
    assert end[-1] == len(sample) and np.array_equal(steps.position[1:], end[:-1])
    assert np.array_equal(np.minimum(steps.accepted.max(axis=1) + 1, len(sample) - steps.position), steps.advanced)
    assert np.all(steps.accepted <= steps.lengths) and np.all(steps.shared <= steps.lengths)
    # The text takes one path through the tree: no token of it is counted on two paths.
    own = np.maximum(0, steps.accepted - steps.shared)
    assert np.array_equal(own.sum(axis=1), steps.accepted.max(axis=1)) and own[:, 1:].any()
    drafted = np.arange(3) < steps.lengths[:, :, None]
    assert np.all((steps.acceptance > 0) == drafted) and np.all(np.diff(steps.acceptance, axis=2) <= 1e-6)
