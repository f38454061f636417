"""A prompt that ends in one token many times over: samples that go on otherwise add an edge to every suffix of it."""

import numpy as np
import pytest

from sam.automaton.store import BLOCK_BYTES, NONE, add_group, blocks_for, extend_all, make_store, reserve
from sam.drafting.drafter import Drafter
from tests.sam.brute_force import BruteForce, check_automaton, check_blocks
from tests.sam.stepping import step

PROMPT = [7] * 60
SAMPLES = [[100 + sample, *range(200 + sample, 240 + sample)] for sample in range(8)]
BUDGET = 1 << 20


def test_a_group_takes_a_further_block_in_the_middle_of_a_token():
    prompt, samples = PROMPT[:14], [[100 + sample] for sample in range(16)]
    store, truth, ends = make_store(40), BruteForce(), {}
    root = add_group(store, 0)
    assert reserve(store, 0, len(prompt))
    end = extend_all(store, 0, root, np.array(prompt, np.int32))
    for token in prompt:
        truth.append("prompt", token)
    for name, sample in enumerate(samples):
        truth.fork("prompt", name)
        assert reserve(store, 0, len(sample))
        ends[name] = extend_all(store, 0, end, np.array(sample, np.int32))
        for token in sample:
            truth.append(name, token)
    check_automaton(store, root, truth, ends)
    check_blocks(store, [0])
    group = store.groups[0]
    assert group["num_blocks"] > blocks_for(int(group["num_tokens"]))


class Samples:
    """Samples of one prompt, written side by side at different speeds, in a drafter that may be too small."""

    def __init__(self, drafter: Drafter, seed: int):
        self.drafter, self.errors, self.drafted = drafter, 0, 0
        self._rng = np.random.default_rng(seed)

    def write(self, name: str) -> None:
        """As an engine does it: what a failed step has left out comes with the next one."""
        ids, written = [f"{name}{sample}" for sample in range(len(SAMPLES))], [0] * len(SAMPLES)
        for request in ids:
            self.drafter.start(request, np.array(PROMPT, np.int32))
        while running := [i for i, sample in enumerate(SAMPLES) if written[i] < len(sample)]:
            names = [ids[i] for i in running]
            pieces = []
            for i, known in zip(running, self.drafter.lengths(names) - len(PROMPT), strict=True):
                written[i] += int(self._rng.choice([1, 1, 1, 2, 9]))
                pieces.append(SAMPLES[i][known : written[i]])
            offsets = np.cumsum([0, *map(len, pieces)])
            try:
                tokens = np.array(sum(pieces, []), np.int32)
                self.drafted += len(step(self.drafter, names, tokens, offsets, np.full(len(names), 3)).token_ids)
            except MemoryError:
                self.errors += 1
        for request in ids:
            self.drafter.finish(request)


@pytest.mark.parametrize("seed", range(20))
def test_with_memory_it_goes_on(seed):
    drafter = Drafter(max_draft_tokens=3, memory_budget_bytes=BUDGET)
    samples = Samples(drafter, seed)
    samples.write("a")
    assert samples.errors == 0 and samples.drafted > 0 and drafter.counters["overflow_requests"] == 0
    check_blocks(drafter.store, list(drafter.groups._groups))


def test_without_memory_the_group_is_left_and_the_next_one_drafts():
    """Walking a torn automaton would not end."""
    torn = 0
    for blocks in range(4, 14):
        for seed in range(20):
            drafter = Drafter(max_draft_tokens=3, cross_prompt=False, memory_budget_bytes=blocks * BLOCK_BYTES)
            samples = Samples(drafter, seed)
            samples.write("a")
            if samples.errors == 0:
                continue
            torn += 1
            assert drafter.counters["overflow_requests"] >= len(SAMPLES)
            assert drafter.groups.find(np.array(PROMPT, np.int32)) == NONE and drafter.nbytes == 0
            drafter.start("b", np.array([1, 2, 3, 1, 2], np.int32))
            assert drafter.draft(["b"], np.array([3])).token_ids.tolist() == [3, 1, 2]
            check_blocks(drafter.store, list(drafter.groups._groups))
    assert torn > 10
