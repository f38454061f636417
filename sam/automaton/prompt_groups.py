"""The groups of a drafter: found by their prompts, kept for a while when nobody uses them."""

import heapq
from collections.abc import Callable

import numpy as np

from sam.automaton.edge_table import NONE, find
from sam.automaton.store import BLOCK_BYTES, BLOCK_NODES, Store, add_group, blocks_for, drop_group, reserve
from sam.jit import kernel


@kernel
def _path_matches(store, root, tokens, end):
    """Whether `tokens`, from the root, are the longest string of state `end`."""
    state = np.int64(root)
    for i in range(tokens.size):
        edge = find(store, state, np.int64(tokens[i]))
        if edge == NONE:
            return False
        state = np.int64(store.nodes[edge].target)
    return state == end and store.nodes[end].length == tokens.size


class Groups:
    """Automata of a store, one for each prompt.

    A group is idle when no request uses it. Idle groups stay, up to `kept_tokens` tokens in all, those that wrote with
    an older policy leaving first, then those idle for longest. `on_drop` is called with each group that leaves. The
    texts of one group in `count_every` are numbered, beginning with the first; 0: of none.

    Attributes:
        prompt_end: for each group the state in which its prompt ends.
        first_text: for each group whose texts are numbered, the number of the first one by its newest policy.
    """

    def __init__(
        self,
        store: Store,
        kept_tokens: int,
        on_drop: Callable[[int], None] = lambda group: None,
        count_every: int = 0,
    ):
        self.store, self.kept_tokens, self._on_drop, self._count_every = store, kept_tokens, on_drop, count_every
        self._made = 0
        self.prompt_end: dict[int, int] = {}
        self.first_text: dict[int, int] = {}
        self._by_hash: dict[int, list[int]] = {}
        self._hash: dict[int, int] = {}
        self._users: dict[int, int] = {}
        self._version: dict[int, int] = {}
        self._texts: dict[int, int] = {}  # that have begun in each group whose texts are numbered
        # Idle groups by (version, time); an entry counts while `_idle_since` still says so.
        self._heap: list[tuple[int, int, int]] = []
        self._idle_since: dict[int, int] = {}
        self._idle_size: dict[int, int] = {}  # tokens when it became idle: siblings elsewhere may add some
        self._idle_tokens = self._clock = self._highest = 0
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._hash)

    @property
    def nbytes(self) -> int:
        return self._used_blocks * BLOCK_BYTES

    @property
    def free_blocks(self) -> int:
        return len(self.store.blocks) - self._used_blocks

    @property
    def _used_blocks(self) -> int:
        return int(self.store.counters[0]["num_used_blocks"])

    def root(self, group: int) -> int:
        return int(self.store.groups[group]["first_block"]) * BLOCK_NODES

    def find(self, prompt: np.ndarray) -> int:
        """The group of `prompt`, or NONE. A hash names the candidates, the automaton itself decides."""
        for group in self._by_hash.get(hash(prompt.tobytes()), ()):
            if _path_matches(self.store, self.root(group), prompt, self.prompt_end[group]):
                return group
        return NONE

    def add(self, prompt: np.ndarray) -> int:
        """An empty group with space for its prompt, to be joined at once; NONE if blocks are short."""
        if self.free_blocks < blocks_for(prompt.size):
            return NONE
        if self._free:
            group = self._free.pop()
        else:
            group, self._highest = self._highest, self._highest + 1
        add_group(self.store, group)
        reserve(self.store, group, prompt.size)
        self._hash[group] = hash(prompt.tobytes())
        self._by_hash.setdefault(self._hash[group], []).append(group)
        self._users[group] = self._version[group] = 0
        if self._count_every and self._made % self._count_every == 0:
            self._texts[group] = self.first_text[group] = 0
        self._made += 1
        return group

    def reserve(self, group: int, tokens: int) -> None:
        """Space in a group for text of nobody who uses it; the caller has made sure that blocks are free."""
        reserve(self.store, group, tokens)
        if group in self._idle_since:
            self._idle_size[group] += tokens
            self._idle_tokens += tokens

    def join(self, group: int, version: int) -> None:
        """One more request uses the group."""
        if group in self._idle_since:
            del self._idle_since[group]
            self._idle_tokens -= self._idle_size.pop(group)
        self._users[group] += 1
        if version > self._version[group]:
            self._version[group] = version
            if group in self._texts:
                self.first_text[group] = self._texts[group]

    def number_text(self, group: int) -> int:
        """The number of a text that begins in the group, from 0 on; NONE if they are not numbered."""
        if group not in self._texts:
            return NONE
        self._texts[group] += 1
        return self._texts[group] - 1

    def leave(self, group: int) -> int:
        """One request less uses the group; returns the number of idle groups dropped to keep the limit."""
        self._users[group] -= 1
        if self._users[group]:
            return 0
        self._clock += 1
        self._idle_since[group] = self._clock
        self._idle_size[group] = self._tokens(group)
        self._idle_tokens += self._idle_size[group]
        heapq.heappush(self._heap, (self._version[group], self._clock, group))
        if len(self._heap) > 2 * len(self._idle_since) + 64:
            self._heap = [entry for entry in self._heap if self._idle_since.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)
        dropped = 0
        while self._idle_tokens > self.kept_tokens and self.evict():
            dropped += 1
        return dropped

    def evict(self) -> bool:
        """Drop an idle group; False if there is none."""
        while self._heap:
            _, since, group = heapq.heappop(self._heap)
            if self._idle_since.get(group) == since:
                self._drop(group)
                return True
        return False

    def abandon(self, group: int) -> None:
        """Drop a group at once; the caller has made sure that nobody uses it any more."""
        self._idle_since.setdefault(group, 0)
        self._idle_size.setdefault(group, 0)
        self._drop(group)

    def _tokens(self, group: int) -> int:
        return int(self.store.groups[group]["num_tokens"])

    def _drop(self, group: int) -> None:
        del self._idle_since[group]
        self._idle_tokens -= self._idle_size.pop(group)
        candidates = self._by_hash[self._hash[group]]
        candidates.remove(group)
        if not candidates:
            del self._by_hash[self._hash[group]]
        for table in (self._hash, self._users, self._version, self.prompt_end):
            del table[group]
        for table in (self._texts, self.first_text):
            table.pop(group, None)
        drop_group(self.store, group)
        self._free.append(group)
        self._on_drop(group)
