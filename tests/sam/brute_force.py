"""What a suffix automaton should hold, worked out from all suffixes; and what one does hold."""

from collections import defaultdict

import numpy as np

from sam.automaton.store import BLOCK_NODES, IN_TABLE, NONE, blocks_for, find


class BruteForce:
    """Counts with update exclusion, for every string by itself.

    A token appended to a text begins with count one after every suffix that it had never followed. Of the suffixes that
    it had followed, the longest, and those that occur just where that one does, count it once more.
    """

    def __init__(self):
        self.texts = defaultdict(list)
        self.occurrences = defaultdict(set)
        self.counts = defaultdict(dict)
        self.times = defaultdict(dict)
        self.clock = 0

    def append(self, sequence, token):
        text = self.texts[sequence]
        self.clock += 1
        known = None
        for first in range(len(text) + 1):
            suffix = tuple(text[first:])
            if known is None and token in self.counts[suffix]:
                known = self.occurrences[suffix] if suffix else None
                self._count(suffix, token)
                if not suffix:
                    break
            elif known is None:
                self._count(suffix, token)
            elif suffix and self.occurrences[suffix] == known:
                self._count(suffix, token)
            else:
                break
        text.append(token)
        for first in range(len(text)):
            self.occurrences[tuple(text[first:])].add((sequence, len(text)))

    def fork(self, sequence, copy):
        """Let `copy` go on from where `sequence` is, as a sample from its prompt."""
        self.texts[copy] = list(self.texts[sequence])
        for end in range(1, len(self.texts[copy]) + 1):
            for first in range(end):
                self.occurrences[tuple(self.texts[copy][first:end])].add((copy, end))

    def _count(self, suffix, token):
        self.counts[suffix][token] = self.counts[suffix].get(token, 0) + 1
        self.times[suffix][token] = self.clock

    def best(self, suffix):
        counts, times = self.counts[suffix], self.times[suffix]
        return max(counts, key=lambda token: (counts[token], times[token]))


def transitions(store, state):
    """token -> (target, count) of one state."""
    nodes, found = store.nodes, {}
    if nodes[state]["total_count"]:
        edge = state
        while edge != NONE:
            found[int(nodes[edge]["token"])] = (int(nodes[edge]["target"]), int(nodes[edge]["count"]))
            edge = nodes[edge]["first_extra_edge" if edge == state else "next_edge"]
    return found


def check_automaton(store, root, truth, ends):
    """Every substring: its continuations' counts and the best of them, and the length and link of its state."""
    state_of, nodes = {(): root}, store.nodes
    for substring in sorted(truth.occurrences, key=len):
        target, _ = transitions(store, state_of[substring[:-1]])[substring[-1]]
        state_of[substring] = target
    longest = {state: len(substring) for substring, state in state_of.items()}
    for substring, state in state_of.items():
        found = transitions(store, state)
        assert {token: count for token, (_, count) in found.items()} == truth.counts.get(substring, {}), substring
        assert nodes[state]["total_count"] == sum(count for _, count in found.values())
        for token, (target, _) in found.items():
            assert target == state_of[(*substring, token)]
            assert nodes[find(store, state, token)]["target"] == target
        if found:
            assert nodes[nodes[state]["argmax_edge"]]["token"] == truth.best(substring), substring
        assert nodes[state]["length"] == longest[state]
        if suffix := substring[1:]:
            is_always_in_it = truth.occurrences[suffix] == truth.occurrences[substring]
            assert (state_of[suffix] == state) == is_always_in_it
            assert is_always_in_it or nodes[state]["link"] == state_of[suffix]
    assert {name: state_of[tuple(truth.texts[name])] for name in ends} == ends


def check_blocks(store, groups):
    """The blocks of `groups` and the dropped ones are apart and complete, and the table holds their edges."""
    seen, counters = [], store.counters[0]
    for group in store.groups[groups]:
        block, count = int(group["last_block"]), 0
        while block != NONE:
            seen.append(block)
            count += 1
            block = int(store.blocks[block])
        assert seen[-1] == group["first_block"] and count == group["taken_blocks"] <= group["num_blocks"]
        assert group["num_blocks"] >= max(1, blocks_for(int(group["num_tokens"])))
    assert counters["num_used_blocks"] == store.groups[groups]["num_blocks"].sum()
    block = int(counters["dropped_block"])
    while block != NONE:
        seen.append(block)
        block = int(store.blocks[block])
    assert sorted(seen) == list(range(int(counters["num_touched_blocks"])))
    in_table = np.flatnonzero(store.nodes["first_extra_edge"][: len(seen) * BLOCK_NODES] == IN_TABLE)
    links, found = store.hash_buckets[: counters["num_buckets"]], []
    while len(links := links[links != NONE]):
        found.append(links)
        links = store.nodes["hash_next"][links]
    assert sorted(np.concatenate([in_table[:0], *found])) == in_table.tolist()
