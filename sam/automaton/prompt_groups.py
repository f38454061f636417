"""The groups of a drafter: found by their prompts, kept for a while when nobody uses them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sam.automaton.store import BLOCK_BYTES, BLOCK_NODES, NONE, Store, add_group, blocks_for, drop_group, find
from sam.jit import kernel


@kernel
def walk(store, state, tokens):
    """The state in which the text ends that ends in `state` and goes on with the first `tokens`, as far as the group
    has that text, and how many these are."""
    state, length = np.int64(state), store.nodes[state].length
    for i in range(tokens.size):
        edge = find(store, state, np.int64(tokens[i]))
        if edge == NONE or store.nodes[store.nodes[edge].target].length != length + i + 1:
            return state, i
        state = np.int64(store.nodes[edge].target)
    return state, tokens.size


@dataclass
class Group:
    """What is known of a group: the hash of its prompt, its requests, and their newest policy."""

    key: int
    users: int = 0
    version: int = 0


class Groups:
    """Automata of a store, one for each prompt.

    A group is idle when no request uses it. Idle groups stay, up to `kept_tokens` tokens in all, those that wrote with
    an older policy leaving first, then those idle for longest. `on_drop` is called with each group that leaves.

    Attributes:
        prompt_end: for each group the state in which its prompt ends, of whom appends it.
    """

    def __init__(self, store: Store, kept_tokens: int, on_drop: Callable[[int], None]):
        self.store, self.kept_tokens, self._on_drop = store, kept_tokens, on_drop
        self.prompt_end: dict[int, int] = {}
        self._groups: dict[int, Group] = {}
        self._by_key: dict[int, list[int]] = {}
        self._idle: dict[int, dict[int, int]] = {}  # by version: tokens of each, those idle for longest first
        self._idle_tokens = 0
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._groups)

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
        """The group of `prompt`, or NONE. A hash names the candidates, the automaton itself decides."""
        for group in self._by_key.get(hash(prompt.tobytes()), ()):
            if walk(self.store, self.root(group), prompt) == (self.prompt_end[group], prompt.size):
                return group
        return NONE

    def add(self, prompt: np.ndarray) -> int:
        """An empty group, to be given its prompt and joined at once; NONE if blocks are short for the prompt."""
        if self.free_blocks < blocks_for(prompt.size):
            return NONE
        group = self._free.pop() if self._free else len(self._groups)
        add_group(self.store, group)
        self._groups[group] = Group(hash(prompt.tobytes()))
        self._by_key.setdefault(self._groups[group].key, []).append(group)
        return group

    def join(self, group: int, version: int) -> None:
        """One more request uses the group."""
        entry = self._groups[group]
        self._forget_idle(group)
        entry.users, entry.version = entry.users + 1, max(entry.version, version)

    def leave(self, group: int) -> int:
        """One request less uses the group; returns the number of idle groups dropped to keep the limit."""
        entry, dropped = self._groups[group], 0
        entry.users -= 1
        if entry.users == 0:
            tokens = int(self.store.groups[group]["num_tokens"])
            self._idle.setdefault(entry.version, {})[group] = tokens
            self._idle_tokens += tokens
            while self._idle_tokens > self.kept_tokens and self.evict():
                dropped += 1
        return dropped

    def evict(self) -> bool:
        """Drop an idle group; False if there is none."""
        if not self._idle:
            return False
        self.drop(next(iter(self._idle[min(self._idle)])))
        return True

    def _forget_idle(self, group: int) -> None:
        version = self._groups[group].version
        if group in (idle := self._idle.get(version, {})):
            self._idle_tokens -= idle.pop(group)
            if not idle:
                del self._idle[version]

    def drop(self, group: int) -> None:
        """Drop a group that nobody uses, or will use any more."""
        self._forget_idle(group)
        key = self._groups.pop(group).key
        self._by_key[key].remove(group)
        if not self._by_key[key]:
            del self._by_key[key]
        self.prompt_end.pop(group, None)
        drop_group(self.store, group)
        self._free.append(group)
        self._on_drop(group)
