"""The groups of a drafter: found by their prompts, kept for a while when nobody uses them."""

from collections.abc import Callable

import numpy as np

from sam.automaton.store import BLOCK_BYTES, BLOCK_NODES, NONE, Store, add_group, blocks_for, drop_group, find
from sam.jit import kernel


@kernel
def walk(store, state, tokens):
    """The state in which the text ends that ends in `state` and goes on with the first `tokens`, as far as the group
    has that text, and how many these are."""
    state = np.int64(state)
    length = store.nodes[state].length
    for i in range(tokens.size):
        edge = find(store, state, np.int64(tokens[i]))
        if edge == NONE or store.nodes[store.nodes[edge].target].length != length + i + 1:
            return state, i
        state = np.int64(store.nodes[edge].target)
    return state, tokens.size


class Groups:
    """Automata of a store, one for each prompt.

    A group is idle when no request uses it. Idle groups stay, up to `kept_tokens` tokens in all, those idle for longest
    leaving first. `on_drop` is called with each group that leaves.
    """

    def __init__(self, store: Store, kept_tokens: int, on_drop: Callable[[int], None]):
        self.store = store
        self.kept_tokens = kept_tokens
        self._on_drop = on_drop
        self.prompts: dict[int, bytes] = {}  # int32 [length]
        self.prompt_end: dict[int, int] = {}  # the state in which each group's prompt ends; who appends it sets it
        self._users: dict[int, int] = {}
        self._by_prompt: dict[bytes, int] = {}
        self._idle: dict[int, int] = {}  # tokens of each, those idle for longest first
        self._idle_tokens = 0
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks in use."""
        return int(self.store.counters[0]["num_used_blocks"]) * BLOCK_BYTES

    @property
    def free_blocks(self) -> int:
        """Blocks that no group has."""
        return len(self.store.blocks) - int(self.store.counters[0]["num_used_blocks"])

    def root(self, group: int) -> int:
        """The state of the empty text."""
        return int(self.store.groups[group]["first_block"]) * BLOCK_NODES

    def find(self, prompt: np.ndarray) -> int:
        """The group of `prompt`, or NONE."""
        return self._by_prompt.get(prompt.tobytes(), NONE)

    def add(self, prompt: np.ndarray) -> int:
        """An empty group, to be given its prompt and joined at once; NONE if blocks are short for the prompt."""
        if self.free_blocks < blocks_for(prompt.size):
            return NONE
        group = self._free.pop() if self._free else len(self)
        add_group(self.store, group)
        key = prompt.tobytes()
        self.prompts[group] = key
        self._by_prompt[key] = group
        self._users[group] = 0
        return group

    def join(self, group: int) -> None:
        """One more request uses the group."""
        self._idle_tokens -= self._idle.pop(group, 0)
        self._users[group] += 1

    def leave(self, group: int) -> int:
        """One request less uses the group; returns the number of idle groups dropped to keep the limit."""
        self._users[group] -= 1
        dropped = 0
        if self._users[group] == 0:
            self._idle[group] = int(self.store.groups[group]["num_tokens"])
            self._idle_tokens += self._idle[group]
            while self._idle_tokens > self.kept_tokens and self.evict():
                dropped += 1
        return dropped

    def evict(self) -> bool:
        """Drop the group that has been idle for longest; False if there is none."""
        if not self._idle:
            return False
        self.drop(next(iter(self._idle)))
        return True

    def drop(self, group: int) -> None:
        """Drop a group that nobody uses, or will use any more."""
        self._idle_tokens -= self._idle.pop(group, 0)
        key = self.prompts.pop(group)
        if self._by_prompt.get(key) == group:  # with the scope of a request each has a group of its own
            del self._by_prompt[key]
        self.prompt_end.pop(group, None)
        del self._users[group]
        drop_group(self.store, group)
        self._free.append(group)
        self._on_drop(group)
