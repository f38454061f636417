"""A shard's memory: the responses of each group as a log that only grows. No threads, no clock, no Ray.

A log's entries are pieces of responses in the order of their arrival, numbered without end: a group that comes back
after it was dropped goes on with higher numbers. A cursor is the number of the first entry that its holder has not
seen, so asking twice does no harm. An append says at which position of the response it begins: what is there already is
skipped, and what would leave a gap is not taken.
"""

import math
import secrets
from array import array
from collections import OrderedDict

import numpy as np

from sam.sharing.messages import KEY_BYTES, MAX_TOKENS, Message, Reply, WrongRunError, offsets_of

ENTRY = 4  # integers of an entry: member, position, where its tokens begin in the log, their number
BEGINS = 2  # place in an entry
# Bytes of Python's own objects, measured by tests/sam/sharing/test_groups.py; arrays over-allocate by an eighth.
GROUP_BYTES, REQUEST_BYTES, GROWTH = 1200, 250, 1.125
# A group that nobody has asked for or appended to for so long may go for another of the same weight version.
IDLE_SECONDS = 10.0


class Group:
    """The log of one prompt's responses, whose first entry has the number `base`.

    Attributes:
        entries: int32 [entries, ENTRY], flat.
        tokens: of all entries.
        members: number of each response, in the order in which they began, by its client and request.
        names: int32 [members, 2], client and request, flat.
        lengths: tokens of each member.
        clients: that have written here.
        nbytes: that the group takes.
    """

    def __init__(self, base: int) -> None:
        self.base = base
        self.entries, self.tokens = array("i"), array("i")
        self.members: dict[tuple[int, int], int] = {}
        self.names, self.lengths = array("i"), array("i")
        self.clients: set[int] = set()
        self.version = -1
        self.touched = -math.inf
        self.nbytes = GROUP_BYTES

    @property
    def end(self) -> int:
        """The cursor of a reader that has seen everything."""
        return self.base + len(self.entries) // ENTRY

    def length(self, name: tuple[int, int]) -> int:
        """Tokens of the response of that client and request."""
        return self.lengths[member] if (member := self.members.get(name)) is not None else 0

    def add(self, name: tuple[int, int], tokens: np.ndarray | memoryview) -> None:
        """Append an entry to the response of that client and request."""
        if (member := self.members.get(name)) is None:
            member = self.members[name] = len(self.members)
            self.names.extend(name)
            self.lengths.append(0)
            self.clients.add(name[0])
        self.entries.extend((member, self.lengths[member], len(self.tokens), len(tokens)))
        self.tokens.frombytes(tokens.tobytes())
        self.lengths[member] += len(tokens)

    def since(self, cursor: int, max_tokens: int) -> tuple[array, array, int]:
        """Entries from `cursor` on, their tokens, and the cursor after them; at most `max_tokens`, but one entry."""
        begin, end = (cursor - self.base) * ENTRY, len(self.entries)
        first = self.entries[begin + BEGINS]
        if len(self.tokens) - first > max_tokens:
            begins = np.frombuffer(self.entries, np.int32)[begin + BEGINS :: ENTRY]
            end = begin + ENTRY * max(1, int(np.searchsorted(begins, first + max_tokens, side="right")) - 1)
        last = self.entries[end + BEGINS] if end < len(self.entries) else len(self.tokens)
        return self.entries[begin:end], self.tokens[first:last], self.base + end // ENTRY


def most_bytes(groups: int, responses: int, tokens: int) -> int:
    """Bytes that as many groups of as many responses of `tokens` each take at most: with an entry for each token."""
    text = tokens * GROWTH * (ENTRY + 1) * np.dtype(np.int32).itemsize
    return math.ceil(groups * (GROUP_BYTES + responses * (REQUEST_BYTES + text)))


def _integers(parts: list) -> np.ndarray:
    """int32, arrays of integers one after the other."""
    return np.frombuffer(b"".join(parts), np.int32)


class Groups:
    """The groups of a shard, within a budget of memory and of time.

    Args:
        run_id: of the run that the shard belongs to.
        budget_bytes: of all groups. Beyond it those of the oldest weight version leave first, of equals the one that
            was touched longest ago; a group in use is not evicted for one of its own version or an older one, whose
            append is refused then.
        ttl_seconds: a group that nobody has touched for longer is forgotten.
    """

    def __init__(self, run_id: str, budget_bytes: int, ttl_seconds: float):
        self.run_id, self.budget_bytes, self.ttl_seconds = run_id, budget_bytes, ttl_seconds
        self.incarnation = secrets.randbits(62)
        self.nbytes = self.evicted = self.expired = 0
        self._base = 0  # number of a new log's first entry: higher than any that was dropped
        self._groups: OrderedDict[bytes, Group] = OrderedDict()  # the one touched longest ago first
        self._by_version: dict[int, OrderedDict[bytes, None]] = {}  # in the same order

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def num_tokens(self) -> int:
        """Tokens of all groups."""
        return sum(len(group.tokens) for group in self._groups.values())

    def exchange(self, message: Message, now: float) -> Reply:
        """Take a client's new text and give it the others'.

        Args:
            now: seconds by the shard's own steady clock.

        Raises:
            WrongRunError: the message is of another run.
        """
        if message.run_id != self.run_id:
            raise WrongRunError(f"a client of run {message.run_id} at a shard of run {self.run_id}: refused")
        self.expire(now)
        keys = [message.keys[i : i + KEY_BYTES] for i in range(0, len(message.keys), KEY_BYTES)]
        have, is_full = self._take(message, keys, now)
        bases = np.array([group.base if (group := self._groups.get(key)) else -1 for key in keys], np.int64)
        return Reply(self.incarnation, have, is_full, self.evicted, bases, *self._give(message, keys, now))

    def _take(self, message: Message, keys: list[bytes], now: float) -> tuple[np.ndarray, bool]:
        have, is_full, offsets = [], False, message.offsets.tolist()
        text = memoryview(np.ascontiguousarray(message.tokens))  # is cut in half the time that an array is
        columns = (message.groups, message.requests, message.versions, message.positions)
        for i, (group, *piece) in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            tokens = text[offsets[i] : offsets[i + 1]]
            length, was_refused = self.append(keys[group], message.client, *piece, tokens, now)
            have.append(length)
            is_full |= was_refused
        return np.array(have, np.int32), is_full

    def register_group(self, key: bytes, version: int, now: float) -> Group:
        """The group of that key, a new one if need be, with a response by weights of `version` in it."""
        if (group := self._groups.get(key)) is None:
            group = self._groups[key] = Group(self._base)
            self.nbytes += group.nbytes
        if version > group.version:
            self._leave_version(key, group)
            self._by_version.setdefault(version, OrderedDict())[key] = None
            group.version = version
        self._touch(key, group, now)
        return group

    def append(
        self,
        key: bytes,
        client: int,
        request: int,
        version: int,
        position: int,
        tokens: np.ndarray | memoryview,
        now: float,
    ) -> tuple[int, bool]:
        """Append tokens, int32, to a response.

        Returns:
            Tokens that the group has of the response, and whether memory was short. Fewer tokens than the end of this
            piece: nothing was taken, and the client has to send again from there.
        """
        group = self._groups.get(key)
        known = group.length((client, request)) if group is not None else 0
        if position > known or position + len(tokens) <= known:
            return known, False
        tokens = tokens[known - position :]
        needed = int(GROWTH * (len(tokens) + ENTRY) * tokens.itemsize) + (0 if known else REQUEST_BYTES)
        if not self._make_space(needed + (GROUP_BYTES if group is None else 0), key, version, now):
            return known, True
        group = self.register_group(key, version, now)
        group.add((client, request), tokens)
        group.nbytes += needed
        self.nbytes += needed
        return known + len(tokens), False

    def fetch(self, key: bytes, since: int, now: float, max_tokens: int = MAX_TOKENS) -> tuple[array, array, int]:
        """The entries of a group's log from the cursor `since` on, their tokens, and the cursor after them."""
        if (group := self._groups.get(key)) is None:
            return array("i"), array("i"), 0
        self._touch(key, group, now)
        # A cursor outside the log is of one that has been forgotten since, or of another incarnation.
        cursor = since if group.base <= since <= group.end else group.base
        if cursor == group.end:
            return array("i"), array("i"), cursor
        return group.since(cursor, max_tokens)

    def _give(self, message: Message, keys: list[bytes], now: float):
        ends, named, names, given, parts, texts, owners, left = [], [], [], [], [], [], [], MAX_TOKENS
        asked = zip(keys, message.since.tolist(), message.known.tolist(), strict=True)
        for number, (key, since, known) in enumerate(asked):
            end, new = since, b""
            if since >= 0 and left > 0:
                entries, tokens, end = self.fetch(key, since, now, left)
                if entries and (group := self._groups[key]).clients != {message.client}:
                    new = group.names[2 * known :]
                    given.append((number, len(entries) // ENTRY, len(group.members)))
                    parts.append(entries)
                    texts.append(tokens)
                    owners.append(group.names)
                    left -= len(tokens)
            ends.append(end)
            named.append(len(new) // 2)
            names.append(new)
        entries = _integers(parts).reshape(-1, ENTRY)
        numbers, counts, members = np.array(given or [(0, 0, 0)], np.int32).T
        first_members = np.repeat(offsets_of(members)[:-1], counts)
        others = _integers(owners)[::2][first_members + entries[:, 0]] != message.client
        tokens = _integers(texts)[np.repeat(others, entries[:, 3])]
        member, position, _, count = np.ascontiguousarray(entries[others].T)
        pieces = np.repeat(numbers, counts)[others], member, position, offsets_of(count), tokens
        return np.array(ends, np.int64), np.array(named, np.int32), _integers(names).reshape(-1, 2), *pieces

    def _touch(self, key: bytes, group: Group, now: float) -> None:
        if group.touched == now:  # in this exchange already
            return
        group.touched = now
        self._groups.move_to_end(key)
        self._by_version[group.version].move_to_end(key)

    def expire(self, now: float) -> None:
        """Forget the groups that nobody has touched for the time to live."""
        while self._groups:
            key, group = next(iter(self._groups.items()))
            if now - group.touched <= self.ttl_seconds:
                return
            self._drop(key)
            self.expired += 1

    def _make_space(self, needed: int, key: bytes, version: int, now: float) -> bool:
        """Evict until `needed` bytes are free for group `key`; False if those in use have to stay."""
        while self.nbytes + needed > self.budget_bytes:
            if (victim := self._victim(key)) is None:
                return False
            group = self._groups[victim]
            if group.version >= version and now - group.touched <= IDLE_SECONDS:
                return False
            self._drop(victim)
            self.evicted += 1
        return True

    def _victim(self, kept: bytes) -> bytes | None:
        """The group to evict first, other than `kept`."""
        for version in sorted(self._by_version):
            for key in self._by_version[version]:
                if key != kept:
                    return key
        return None

    def _drop(self, key: bytes) -> None:
        group = self._groups.pop(key)
        self.nbytes -= group.nbytes
        self._base = max(self._base, group.end)
        self._leave_version(key, group)

    def _leave_version(self, key: bytes, group: Group) -> None:
        if keys := self._by_version.get(group.version):
            del keys[key]
            if not keys:
                del self._by_version[group.version]
