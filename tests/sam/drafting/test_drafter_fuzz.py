"""Random lifecycles of requests, with more of them than memory: nothing lost, nothing left, every rank alike."""

import itertools

import numpy as np
import pytest

from sam.automaton.store import BLOCK_BYTES, NONE, blocks_for
from sam.drafting.drafter import Drafter
from tests.sam.brute_force import BruteForce, check_automaton, check_blocks
from tests.sam.stepping import append, step, tokens

K = 3


class Fuzz:
    """Random lifecycles under memory pressure, in two drafters at once and, if `deep`, in brute force."""

    def __init__(self, seed, scope, budget, deep=False):
        self.rng, self.scope, self.budget, self.deep = np.random.default_rng(seed), scope, budget, deep
        arguments = dict(max_draft_tokens=K, scope=scope, history_tokens=200, memory_budget_bytes=budget)
        self.drafters = [Drafter(**arguments), Drafter(**arguments)]
        self.prompts = [tuple(self.rng.integers(3, size=length).tolist()) for length in (1, 2, 5, 40)]
        self.texts, self.next = {}, 0
        self.truths = {}  # group to what its automaton should hold

    def run(self, operations):
        for _ in range(operations):
            choice = self.rng.integers(10)
            if choice == 0 or not self.texts:
                self.start()
            elif choice == 1:
                self.stop()
            else:
                self.step(apart=choice == 2)
        first, second = self.drafters
        assert first.counters == second.counters
        for mine, other in zip((*first.learned, *first.memory), (*second.learned, *second.memory), strict=True):
            assert mine.tobytes() == other.tobytes()
        assert first.nbytes + sum(array.nbytes for array in first.memory) <= self.budget
        check_blocks(first.store, list(first.groups.prompts))

    def start(self):
        request, prompt = str(self.next), self.prompts[self.rng.integers(len(self.prompts))]
        self.next += 1
        new = self.scope == "request" or self.drafters[0].groups.find(tokens(*prompt)) == NONE
        for drafter in self.drafters:
            drafter.start(request, tokens(*prompt))
        self.texts[request] = list(prompt)
        group = self.group_of(request)
        if new:
            self.truths[group] = BruteForce()
            for token in prompt:
                self.truths[group].append("prompt", token)
        if self.deep:
            self.truths[group].fork("prompt", request)

    def group_of(self, request):
        return self.drafters[0]._group_of.get(self.drafters[0]._slots[request])

    def stop(self):
        request = list(self.texts)[self.rng.integers(len(self.texts))]
        for drafter in self.drafters:
            drafter.finish(request)
        del self.texts[request]

    def step(self, apart):
        ids = [request for request in self.texts if self.rng.integers(2)]
        new = {request: self.rng.integers(3, size=self.rng.integers(5)) for request in ids}
        for request, piece in new.items():
            self.texts[request] += piece.tolist()
            for token in piece.tolist() if self.deep else ():
                self.truths[self.group_of(request)].append(request, token)
        budgets = self.rng.integers(0, K + 1, size=len(ids))
        drafts = []
        for drafter in self.drafters:
            for request, piece in new.items() if apart else ():
                append(drafter, {request: piece})
            drafts.append(drafter.draft(ids, budgets) if apart else step(drafter, new, budgets))
        assert drafts[0].token_ids.tolist() == drafts[1].token_ids.tolist()
        assert (np.diff(drafts[0].offsets) <= budgets).all()
        assert set(drafts[0].token_ids.tolist()) <= {0, 1, 2}
        assert self.drafters[0].lengths(ids).tolist() == [len(self.texts[request]) for request in ids]

    def check_groups(self):
        """The automaton of every group in use against all that was ever written into it."""
        drafter = self.drafters[0]
        for group in set(drafter._group_of.values()):
            slots = {name: slot for name, slot in drafter._slots.items() if drafter._group_of.get(slot) == group}
            ends = {name: int(drafter.sequences.texts[slot]["end"]) for name, slot in slots.items()}
            check_automaton(drafter.store, drafter.groups.root(group), self.truths[group], ends)


@pytest.mark.parametrize("scope", ["request", "group", "history"])
@pytest.mark.parametrize("budget", [20 * BLOCK_BYTES, 8 << 20])
def test_fuzzed_lifecycles(scope, budget):
    overflow = 0
    for seed in range(10):
        fuzz = Fuzz(seed, scope, budget)
        fuzz.run(300)
        drafter, *_ = fuzz.drafters
        overflow += drafter.counters["overflow_requests"]
        for request in fuzz.texts:
            drafter.finish(request)
        while drafter.groups.evict():
            pass
        assert drafter.nbytes == len(drafter.groups) == 0, "all given back"
    assert (overflow > 0) == (budget < 8 << 20)


@pytest.mark.statistical
@pytest.mark.parametrize("scope", ["request", "group", "history"])
def test_automata_stay_right_while_their_blocks_change_hands(scope):
    for seed in range(8):
        fuzz = Fuzz(seed, scope, 1 << 20, deep=True)
        for _ in range(4):
            fuzz.run(30)
            fuzz.check_groups()
        assert fuzz.drafters[0].counters["overflow_requests"] == 0


def test_a_token_that_takes_further_blocks_gets_them_or_its_group_is_left():
    """Sixteen samples of one prompt go on otherwise. Walking an automaton that is torn would not end."""
    torn = further = 0
    for length, blocks in itertools.product((14, 30, 60), range(4, 18)):
        drafter = Drafter(max_draft_tokens=K, cross_prompt=False, memory_budget_bytes=blocks * BLOCK_BYTES)
        prompt, samples = tokens(*[7] * length), {str(sample): [100 + sample] for sample in range(16)}
        for request in samples:
            drafter.start(request, prompt)
        try:
            step(drafter, samples)
            group = drafter.store.groups[drafter.groups.find(prompt)]
            further += group["taken_blocks"] > blocks_for(int(group["num_tokens"]))
            check_blocks(drafter.store, list(drafter.groups.prompts))
        except MemoryError:
            torn += 1
            assert drafter.counters["overflow_requests"] == len(samples)
            assert drafter.groups.find(prompt) == NONE and drafter.nbytes == 0
            assert not len(step(drafter, samples).token_ids), "the engine goes on"
            drafter.start("b", tokens(1, 2, 3, 1, 2))
            assert drafter.draft(["b"], np.array([3])).token_ids.tolist() == [3, 1, 2]
    assert torn > 3 and further > 3
