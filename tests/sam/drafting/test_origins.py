"""Where draft tokens come from: exact counts on small texts, and no change in any draft."""

import numpy as np
import pytest

from sam.automaton.corpus_file import add_text, empty_corpus, save_corpus
from sam.automaton.edge_table import IN_TABLE
from sam.automaton.store import NOBODY
from sam.drafting import origins
from sam.drafting.drafter import Drafter
from sam.drafting.origins import NUMBERS, SOURCES
from sam.drafting.token_ids import digest
from sam.record.responses import Recording
from sam.replay.round_robin import replay
from sam.sharing.drafter import SharingDrafter
from sam.sharing.log import Piece

K = 3


def tokens(*values):
    return np.array(values, np.int32)


def make(drafter=Drafter, **settings):
    return drafter(
        **{"max_draft_tokens": K, "count_every": 1, "cross_prompt": False, "memory_budget_bytes": 8 << 20} | settings
    )


def step(drafter, request, *text, budget=K):
    drafts = drafter.step([request], tokens(*text), np.array([0, len(text)]), np.array([budget]))
    return drafts.token_ids.tolist()


def counted(drafter):
    """Draft tokens compared with the text and accepted, of each source that has any."""
    taken = origins.take(drafter.learned.by_source)
    return {source: tuple(row) for source, row in zip(SOURCES, taken.tolist(), strict=True) if row[0]}


def elsewhere(drafter, prompt, *text):
    """A sibling of a request with that prompt, in another replica, writes a text."""
    assert drafter.append_arrived([Piece(digest(prompt), object(), 0, tokens(*text))]) == len(text)


def test_the_own_text_and_the_prompt_are_the_requests_own():
    drafter = make()
    drafter.start("a", tokens(1, 2, 3, 4))
    assert step(drafter, "a", 1) == [2, 3, 4]
    step(drafter, "a", 2, 3, 9, budget=0)
    assert counted(drafter) == {"own": (3, 2)}
    assert step(drafter, "a", 1, 2, 3) == [9, 1, 2]
    step(drafter, "a", 9, budget=0)  # whether the second would have been accepted is not known
    assert counted(drafter) == {"own": (1, 1)}


def test_siblings_here_and_elsewhere_and_what_both_know():
    drafter = make(SharingDrafter)
    for request in ("a", "b"):
        drafter.start(request, tokens(1, 2))
    step(drafter, "b", 5, 6, 7, 8, 5, 6, 7, 8, budget=0)
    elsewhere(drafter, tokens(1, 2), 5, 6, 7, 8, 15, 16, 17, 18)
    assert step(drafter, "a", 5) == [6, 7, 8]
    assert step(drafter, "a", 6, 7, 8, 15) == [16, 17, 18]
    assert counted(drafter) == {"sibling_here": (3, 3)}
    step(drafter, "a", 16, 17, 0, budget=0)
    assert counted(drafter) == {"sibling_elsewhere": (3, 2)}


def test_of_requests_here_the_latest_is_the_source():
    drafter = make()
    for request in ("a", "b"):
        drafter.start(request, tokens(1, 2))
        step(drafter, request, 5, 6, 7, 8, budget=0)
    assert step(drafter, "a", 5) == [6, 7, 8]
    step(drafter, "a", 6, 7, 8, budget=0)
    assert counted(drafter) == {"sibling_here": (3, 3)}
    assert step(drafter, "a", 5) == [6, 7, 8]
    step(drafter, "a", 9, budget=0)
    assert counted(drafter) == {"own": (3, 0)}


def test_earlier_text_is_the_source_of_what_nobody_else_knows():
    drafter = make(SharingDrafter, scope="history", history_tokens=1000)
    drafter.start("a", tokens(1, 2))
    elsewhere(drafter, tokens(1, 2), 5, 6, 7, 8)
    drafter.append_earlier(tokens(1, 2), tokens(5, 6, 7, 8, 15, 16, 17, 18))
    assert step(drafter, "a", 5) == [6, 7, 8]
    assert step(drafter, "a", 6, 7, 8, 15) == [16, 17, 18]
    assert counted(drafter) == {"sibling_elsewhere": (3, 3)}
    step(drafter, "a", 16, 17, 18, budget=0)
    assert counted(drafter) == {"earlier": (3, 3)}


def test_siblings_of_earlier_weights_are_earlier_text():
    drafter = make(scope="history", history_tokens=1000)
    for version, request in enumerate(("a", "b", "c")):
        drafter.start(request, tokens(1, 2), policy_version=version)
        step(drafter, request, 5, 6, 7, 8)
        counted(drafter)
        drafter.finish(request)
    for request in ("d", "e"):
        drafter.start(request, tokens(1, 2), policy_version=2)
    assert step(drafter, "d", 5) == [6, 7, 8], "c has written it with the same weights"
    step(drafter, "d", 9, budget=0)
    assert counted(drafter) == {"sibling_here": (3, 0)}
    drafter.start("f", tokens(1, 2), policy_version=3)
    assert step(drafter, "f", 5) == [6, 7, 8]
    step(drafter, "f", 9, budget=0)
    assert counted(drafter) == {"earlier": (3, 0)}


def test_other_prompts_and_a_corpus(tmp_path):
    corpus = empty_corpus(1 << 20)
    add_text(corpus, tokens(*range(40, 60)))
    save_corpus(corpus, tmp_path / "corpus")
    drafter = make(cross_prompt=True, corpus=tmp_path / "corpus")
    drafter.start("a", tokens(1))
    step(drafter, "a", 21, 22, 23, 24, 25, budget=0)
    drafter.start("b", tokens(2))
    drafts = step(drafter, "b", 21, 22)
    assert drafts[0] == 23
    step(drafter, "b", 23, 0, budget=0)
    assert counted(drafter)["other_prompt"][1] == 1
    assert step(drafter, "b", *range(40, 50)) == [50, 51, 52]
    step(drafter, "b", 50, 51, 52, budget=0)
    assert counted(drafter) == {"corpus": (3, 3)}


def test_one_prompt_in_so_many_is_counted_the_first_one_too():
    drafter = make(count_every=3)
    for prompt in range(7):
        drafter.start("a", tokens(prompt, 50))
        step(drafter, "a", 5, 6, 7, 5)
        step(drafter, "a", 6, 7, 5, budget=0)
        assert counted(drafter) == ({"own": (3, 3)} if prompt % 3 == 0 else {})
        drafter.finish("a")


def test_numbers_begin_again():
    drafter = make(scope="history", history_tokens=1000)
    drafter.start("a", tokens(1, 2))
    group = drafter._group_of[drafter._slots["a"]]
    drafter.groups._texts[group] = NUMBERS
    for version, request in enumerate(("b", "c")):
        drafter.start(request, tokens(1, 2), policy_version=version)
    step(drafter, "b", 5, 6, 7, 8, budget=0)
    step(drafter, "c", 5)
    step(drafter, "c", 6, 7, 8, budget=0)
    assert counted(drafter) == {"earlier": (3, 3)}


@pytest.mark.parametrize("seed", range(3))
def test_every_state_has_a_writer_also_where_blocks_have_been_used_before(seed):
    rng, drafter = np.random.default_rng(seed), make(SharingDrafter, memory_budget_bytes=200_000)
    for number in range(60):
        prompt = tokens(*rng.integers(3, size=4))
        drafter.start("a", prompt)
        for _ in range(10):
            step(drafter, "a", *rng.integers(4, size=3))
            elsewhere(drafter, prompt, *rng.integers(4, size=5))
            drafter.append_earlier(prompt, rng.integers(4, size=5).astype(np.int32))
        group = drafter._group_of[drafter._slots["a"]]
        assert writers_of(drafter.store, group).max() <= origins.EARLIER << origins.NUMBER_BITS | NUMBERS < NOBODY
        drafter.finish("a")
        if number % 5 == 4:
            while drafter.groups.evict():
                pass


def writers_of(store, group):
    """Of all states of a group but the root, which nothing leads to."""
    entry, block, nodes = store.groups[group], store.groups[group]["first_block"], []
    while block != -1:
        used = entry["nodes_in_write_block"] if block == entry["write_block"] else 96
        nodes += range(block * 96, block * 96 + used)
        if block == entry["write_block"]:
            break
        block = store.blocks[block]["next"]
    states = [node for node in nodes[1:] if store.nodes[node]["first_extra_edge"] != IN_TABLE]
    return store.writers[states]


def test_counting_changes_no_draft():
    rng = np.random.default_rng(5)
    phrases = [rng.integers(20, size=rng.integers(3, 12)) for _ in range(30)]
    texts = [
        [np.concatenate([phrases[i] for i in rng.integers(30, size=25)]).astype(np.int32) for _ in range(4)]
        for _ in range(6)
    ]
    recording = Recording([tokens(100 + i) for i in range(6)], texts)
    seen = {}

    class Kept(Drafter):
        def draft(self, *arguments):
            drafts = super().draft(*arguments)
            seen.setdefault(self.groups._count_every, []).append(
                (drafts.token_ids.tolist(), drafts.acceptance.tolist())
            )
            return drafts

    results = [
        replay(recording, lambda every=every: make(Kept, count_every=every, cross_prompt=True), K)
        for every in (0, 1, 3)
    ]
    assert seen[0] == seen[1] == seen[3] and len(seen[0]) > 1000
    assert len({result.accepted for result in results}) == 1
