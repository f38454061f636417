"""A heap whose entries may have gone stale."""

import heapq
from collections.abc import Callable

SPARE_ENTRIES = 64  # stale entries that a heap may hold besides as many as it has live ones


class LazyHeap:
    """A heap of (key, item) in which an item counts only while its key is the current one.

    Args:
        key_of: the current key of an item; None while the item is not to be taken.
        operations: a list of one int, to which each entry pushed, popped or looked at adds one.
    """

    def __init__(self, key_of: Callable[[object], tuple | None], operations: list[int]):
        self._key_of, self._operations = key_of, operations
        self._entries: list[tuple] = []
        self._live_bound = 0

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, item, live: int) -> None:
        """Enter the item under its current key; `live` bounds the number of items that count."""
        if (key := self._key_of(item)) is None:
            return
        self._operations[0] += 1
        heapq.heappush(self._entries, (*key, id(item), item))
        if len(self._entries) > 2 * live + SPARE_ENTRIES:
            current = {id(entry[-1]): entry for entry in self._entries if self._is_current(entry)}
            self._operations[0] += len(self._entries)
            self._entries = list(current.values())
            heapq.heapify(self._entries)

    def first(self):
        """The item with the smallest key, which stays; None if no item counts."""
        while self._entries:
            self._operations[0] += 1
            if self._is_current(self._entries[0]):
                return self._entries[0][-1]
            heapq.heappop(self._entries)
        return None

    def _is_current(self, entry: tuple) -> bool:
        return self._key_of(entry[-1]) == entry[:-2]
