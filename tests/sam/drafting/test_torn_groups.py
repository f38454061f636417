"""A prompt that ends in one token many times over: samples that go on otherwise add an edge to every suffix of it."""

import numpy as np

from sam.automaton.store import BLOCK_BYTES, NONE, blocks_for
from sam.drafting.drafter import Drafter
from tests.sam.brute_force import check_blocks
from tests.sam.stepping import step, tokens

PROMPT = [7] * 60
SAMPLES = [[100 + sample, *range(200 + sample, 240 + sample)] for sample in range(8)]


def write_samples(drafter: Drafter, seed: int) -> int:
    """Samples of one prompt, written side by side at different speeds, in a drafter that may be too small; as an engine
    does it, what a failed step has left out comes with the next one. Returns failed steps."""
    rng, errors = np.random.default_rng(seed), 0
    ids, written = [str(sample) for sample in range(len(SAMPLES))], [0] * len(SAMPLES)
    for request in ids:
        drafter.start(request, tokens(*PROMPT))
    while running := [i for i, sample in enumerate(SAMPLES) if written[i] < len(sample)]:
        new = {}
        for i, known in zip(running, drafter.lengths([ids[i] for i in running]) - len(PROMPT), strict=True):
            written[i] += int(rng.choice([1, 1, 1, 2, 9]))
            new[ids[i]] = SAMPLES[i][known : written[i]]
        try:
            step(drafter, new)
        except MemoryError:
            errors += 1
    return errors


def test_a_group_takes_further_blocks_in_the_middle_of_a_token():
    drafter = Drafter(max_draft_tokens=3, memory_budget_bytes=1 << 20)
    assert write_samples(drafter, 0) == drafter.counters["overflow_requests"] == 0
    many = {f"many {sample}": [100 + sample] for sample in range(16)}
    for request in many:
        drafter.start(request, tokens(*PROMPT[:14]))
    step(drafter, many)
    group = drafter.store.groups[drafter.groups.find(tokens(*PROMPT[:14]))]
    assert group["taken_blocks"] > blocks_for(int(group["num_tokens"]))
    check_blocks(drafter.store, [0, 1])


def test_without_memory_the_group_is_left_and_the_next_one_drafts():
    """Walking a torn automaton would not end."""
    torn = 0
    for blocks in range(4, 14):
        for seed in range(20):
            drafter = Drafter(max_draft_tokens=3, cross_prompt=False, memory_budget_bytes=blocks * BLOCK_BYTES)
            if write_samples(drafter, seed) == 0:
                continue
            torn += 1
            assert drafter.counters["overflow_requests"] >= len(SAMPLES)
            assert drafter.groups.find(tokens(*PROMPT)) == NONE and drafter.nbytes == 0
            drafter.start("b", tokens(1, 2, 3, 1, 2))
            assert drafter.draft(["b"], np.array([3])).token_ids.tolist() == [3, 1, 2]
    assert torn > 10
