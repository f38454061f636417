"""Where draft tokens come from: whose text each state of a group stands for, and draft tokens counted by that.

A group's automaton holds the text of several requests, and does not know which of them a state is from. So each state
keeps its writer, a source and a number within the group, of the best source that has written it: the request's own
prompt, then requests here, those elsewhere, and earlier weights; of equals the latest. A text is written into the state
in which it ends and into the next shorter one, the two from which contexts are taken (sam.drafting.context_mixing).

A draft token has one source: that of the context which gave it most of its probability. Keeping writers and finding
sources takes a few per cent of the drafter's time, so one group in COUNT_EVERY is counted.
"""

import numpy as np

from sam.automaton.edge_table import NONE, find
from sam.automaton.prompt_groups import Groups
from sam.jit import kernel

SOURCES = ("own", "sibling_here", "sibling_elsewhere", "earlier", "other_prompt", "corpus")
OWN, HERE, ELSEWHERE, EARLIER, OTHER_PROMPT, CORPUS = range(len(SOURCES))
COUNT_EVERY = 32
NUMBER_BITS = 13
NUMBERS = (1 << NUMBER_BITS) - 1
UNCOUNTED = -1  # writer of a text whose group is not counted


def new_writer(groups: Groups, group: int, source: int) -> tuple[int, int]:
    """The writer of a text that begins in a group, and the number of its first text of the same weights."""
    number = groups.number_text(group)
    if number == NONE:
        return UNCOUNTED, 0
    return source << NUMBER_BITS | number & NUMBERS, groups.first_text[group]


def make_counts() -> np.ndarray:
    """int64 [SOURCES, 2], draft tokens of each source that have been compared with the text, and those accepted."""
    return np.zeros((len(SOURCES), 2), np.int64)


def take(counts: np.ndarray) -> np.ndarray:
    """What has been counted since the last call."""
    taken = counts.copy()
    counts[:] = 0
    return taken


@kernel
def _source(writer, text):
    """The source of a writer, as a text sees it: requests from before its weights are earlier."""
    source = np.int64(writer) >> NUMBER_BITS
    if source == HERE or source == ELSEWHERE:
        since = (np.int64(writer) - text.first_writer) & NUMBERS
        if since > NUMBERS // 2:
            return np.int64(EARLIER)
    return source


@kernel
def write(store, text):
    """Keep that a text, whose last token has just been appended, has written where it ends."""
    if text.writer == UNCOUNTED:
        return
    end = np.int64(text.end)
    _write(store, text, end)
    link = np.int64(store.nodes[end].link)
    if link != NONE:
        _write(store, text, link)


@kernel
def _write(store, text, state):
    if _source(store.writers[state], text) >= text.writer >> NUMBER_BITS:
        store.writers[state] = text.writer


@kernel
def source_after(store, text, state, token):
    """The source of `token`, drafted for a text, which follows a state of its group."""
    writer = store.writers[store.nodes[find(store, state, token)].target]
    return np.int64(OWN) if writer == text.writer else _source(writer, text)
