"""A prompt that ends in one token many times over: samples that go on otherwise add an edge to every suffix of it."""

import numpy as np
import pytest

from sam.automaton.store import BLOCK_BYTES, NONE, add_group, blocks_for, extend_all, make_store, reserve
from sam.drafting.drafter import Drafter
from tests.sam.brute_force import BruteForce, check_automaton, check_blocks
from tests.sam.stepping import step, tokens

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


def write_samples(drafter: Drafter, seed: int) -> tuple[int, int]:
    """Samples of one prompt, written side by side at different speeds, in a drafter that may be too small; as an engine
    does it, what a failed step has left out comes with the next one. Returns drafted tokens and failed steps."""
    rng, drafted, errors = np.random.default_rng(seed), 0, 0
    ids, written = [str(sample) for sample in range(len(SAMPLES))], [0] * len(SAMPLES)
    for request in ids:
        drafter.start(request, tokens(*PROMPT))
    while running := [i for i, sample in enumerate(SAMPLES) if written[i] < len(sample)]:
        new = {}
        for i, known in zip(running, drafter.lengths([ids[i] for i in running]) - len(PROMPT), strict=True):
            written[i] += int(rng.choice([1, 1, 1, 2, 9]))
            new[ids[i]] = SAMPLES[i][known : written[i]]
        try:
            drafted += len(step(drafter, new).token_ids)
        except MemoryError:
            errors += 1
    for request in ids:
        drafter.finish(request)
    return drafted, errors


@pytest.mark.parametrize("seed", range(20))
def test_with_memory_it_goes_on(seed):
    drafter = Drafter(max_draft_tokens=3, memory_budget_bytes=BUDGET)
    drafted, errors = write_samples(drafter, seed)
    assert errors == 0 and drafted > 0 and drafter.counters["overflow_requests"] == 0
    check_blocks(drafter.store, list(drafter.groups._groups))


def test_without_memory_the_group_is_left_and_the_next_one_drafts():
    """Walking a torn automaton would not end."""
    torn = 0
    for blocks in range(4, 14):
        for seed in range(20):
            drafter = Drafter(max_draft_tokens=3, cross_prompt=False, memory_budget_bytes=blocks * BLOCK_BYTES)
            if write_samples(drafter, seed)[1] == 0:
                continue
            torn += 1
            assert drafter.counters["overflow_requests"] >= len(SAMPLES)
            assert drafter.groups.find(tokens(*PROMPT)) == NONE and drafter.nbytes == 0
            drafter.start("b", tokens(1, 2, 3, 1, 2))
            assert drafter.draft(["b"], np.array([3])).token_ids.tolist() == [3, 1, 2]
            check_blocks(drafter.store, list(drafter.groups._groups))
    assert torn > 10
