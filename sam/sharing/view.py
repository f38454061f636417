"""A client's side of the protocol: its own responses, and how far it has seen those of others. No threads, no clock.

All that is sent can be sent again: positions say where text belongs, and cursors what has been seen. So a message or a
reply that is lost, doubled or late costs a repetition and changes nothing.
"""

from array import array
from dataclasses import dataclass, field

import numpy as np

from sam.sharing.arrivals import Arrivals, merge
from sam.sharing.messages import KEY_BYTES, MAX_TOKENS, Message, Reply, check, offsets_of, shard_of

MAX_LOCAL_TOKENS = 1 << 22  # of finished responses that no shard has confirmed


@dataclass
class LocalText:
    """A response of this client; `acknowledged` of its tokens are in the shard."""

    number: int
    version: int
    prompt_tokens: int
    tokens: array = field(default_factory=lambda: array("i"))
    acknowledged: int = 0
    is_running: bool = True


@dataclass
class KnownGroup:
    """A group as this client sees it.

    Attributes:
        running: requests of this client in it.
        cursor: of the log's first entry that has not been seen.
        base: of the log, as the shard said.
        texts: this client's responses, by their number.
        numbers: those of the requests elsewhere, by their client and number.
        members: the same by the shard's numbers of the group's responses; -1 for this client's own.
    """

    running: int = 0
    cursor: int = 0
    base: int = -1
    texts: dict[int, LocalText] = field(default_factory=dict)
    numbers: dict[tuple[int, int], int] = field(default_factory=dict)
    members: array = field(default_factory=lambda: array("q"))


class View:
    """What one client has to send, and what it has received.

    Args:
        run_id: of the client's run.
        client: its number, 31 bits at random: no two clients of a run have the same.
        shards: of the run.
    """

    def __init__(self, run_id: str, client: int, shards: int):
        self.run_id, self.client, self.shards = run_id, client, shards
        self.lost_tokens = 0  # of own responses that are not shared any more
        self.groups: list[dict[bytes, KnownGroup]] = [{} for _ in range(shards)]
        self._incarnations: list[int | None] = [None] * shards
        self._by_slot: dict[int, tuple[bytes, LocalText]] = {}
        self._next_number = 0
        self._lengths = np.zeros(1024, np.int64)  # received of each request elsewhere
        self._free_numbers: list[int] = []
        self._highest = 0

    def start(self, slot: int, key: bytes, version: int, prompt_tokens: int) -> None:
        """A request of group `key` runs here from now on, and is called `slot` until `finish`."""
        text = LocalText(self._next_number, version, prompt_tokens)
        self._next_number += 1
        group = self._group(key)
        group.running += 1
        group.texts[text.number] = text
        self._by_slot[slot] = key, text

    def append(self, slot: int, position: int, tokens: np.ndarray) -> None:
        """Tokens of a request from `position` on, the prompt's counted. After a gap the rest is not shared."""
        if slot not in self._by_slot:
            return
        text = self._by_slot[slot][1]
        position -= text.prompt_tokens
        if position > len(text.tokens):
            self.lost_tokens += len(tokens)
            return
        text.tokens.frombytes(np.ascontiguousarray(tokens[len(text.tokens) - position :], np.int32).tobytes())

    def finish(self, slot: int) -> None:
        """The request has ended; its text stays until the shard has it."""
        if (found := self._by_slot.pop(slot, None)) is not None:
            key, text = found
            text.is_running = False
            group = self._group(key)
            group.running -= 1
            self._let_go(key, group)

    def forget(self, key: bytes) -> None:
        """The drafter has dropped the group: what is known of it is of no use any more."""
        group = self._group(key)
        self._free_numbers += group.numbers.values()
        group.numbers, group.members, group.cursor = {}, array("q"), 0
        self._let_go(key, group)

    def _group(self, key: bytes) -> KnownGroup:
        return self.groups[shard_of(key, self.shards)].setdefault(key, KnownGroup())

    def _let_go(self, key: bytes, group: KnownGroup) -> None:
        """Forget texts that nobody needs: of groups without a running request, when the shard has them."""
        if group.running:
            return
        group.texts = {n: text for n, text in group.texts.items() if text.acknowledged < len(text.tokens)}
        if not group.texts and not group.numbers:
            del self.groups[shard_of(key, self.shards)][key]

    def drop_unconfirmed(self, shard: int) -> None:
        """Bound what waits while a shard does not answer: finished groups leave, the oldest first."""
        idle = [(key, group) for key, group in self.groups[shard].items() if not group.running and group.texts]
        waiting = sum(len(text.tokens) for _, group in idle for text in group.texts.values())
        for key, group in idle:
            if waiting <= MAX_LOCAL_TOKENS // self.shards:
                return
            waiting -= sum(len(text.tokens) for text in group.texts.values())
            self.lost_tokens += sum(len(text.tokens) - text.acknowledged for text in group.texts.values())
            for text in group.texts.values():
                text.acknowledged = len(text.tokens)
            self._let_go(key, group)

    def message(self, shard: int, wants: bool = True) -> Message | None:
        """What there is to send and to ask; None: nothing.

        Args:
            wants: whether to ask for the others' text.
        """
        keys, since, known, columns, texts, left = [], [], [], [], [], MAX_TOKENS
        for key, group in self.groups[shard].items():
            pieces = []
            for text in group.texts.values():
                if (sent := text.acknowledged) < len(text.tokens) and left > 0:
                    texts.append(text.tokens[sent : sent + left])
                    left -= len(texts[-1])
                    pieces.append((len(keys), text.number, text.version, sent, len(texts[-1])))
            if pieces or (wants and group.running):
                keys.append(key)
                since.append(group.cursor if wants and group.running else -1)
                known.append(len(group.members))
                columns += pieces
        if not keys:
            return None
        groups, numbers, versions, positions, counts = np.array(columns, np.int32).reshape(-1, 5).T
        tokens = np.frombuffer(b"".join(texts), np.int32)
        return Message(
            self.run_id,
            self.client,
            b"".join(keys),
            np.array(since, np.int64),
            np.array(known, np.int32),
            *map(np.ascontiguousarray, (groups, numbers, versions, positions)),
            offsets_of(counts),
            tokens,
        )

    def apply(self, shard: int, message: Message, reply: Reply) -> Arrivals:
        """Take a reply to `message`, and give the text in it that is new.

        Raises:
            ValueError: tokens that are none, or lengths that do not agree.
        """
        check(reply)
        if reply.incarnation != self._incarnations[shard]:
            for group in self.groups[shard].values():
                self._start_again(group, -1)
            self._incarnations[shard] = reply.incarnation
        keys = [message.keys[i : i + KEY_BYTES] for i in range(0, len(message.keys), KEY_BYTES)]
        known = self.groups[shard]
        for key, base in zip(keys, reply.bases.tolist(), strict=True):
            if (group := known.get(key)) is not None and group.base != base:
                self._start_again(group, base)
        for number, index, have in zip(
            message.requests.tolist(), message.groups.tolist(), reply.have.tolist(), strict=True
        ):
            if (group := known.get(keys[index])) is not None and (text := group.texts.get(number)) is not None:
                text.acknowledged = min(have, len(text.tokens))
                if not group.running:
                    self._let_go(keys[index], group)
        return self._arrivals(known, keys, message, reply)

    def _start_again(self, group: KnownGroup, base: int) -> None:
        """The shard has a new log of the group, or none: send all texts again, and read from the begin."""
        group.base, group.cursor, group.members = base, 0, array("q")
        for text in group.texts.values():
            text.acknowledged = 0

    def _arrivals(self, known: dict[bytes, KnownGroup], keys: list[bytes], message: Message, reply: Reply) -> Arrivals:
        new = self._learn_names(known, keys, message, reply)
        groups = [known.get(key) for key in keys]
        members = [group.members if group is not None else b"" for group in groups]
        counts = np.array([len(part) for part in members])
        is_known = reply.members < counts[reply.groups]
        flat = np.append(np.frombuffer(b"".join(members), np.int64), -1)
        numbers = flat[np.where(is_known, offsets_of(counts)[reply.groups] + reply.members, -1)]
        merged, missing = merge(numbers, reply, self._lengths)
        self._lengths[merged.numbers] = merged.positions + np.diff(merged.offsets)
        behind = {*reply.groups[missing].tolist(), *reply.groups[~is_known].tolist()}
        for index, (key, since, end) in enumerate(zip(keys, message.since.tolist(), reply.ends.tolist(), strict=True)):
            if since >= 0 and (group := known.get(key)) is not None:
                # A late reply may begin after what is known, then the log is read again from its begin.
                group.cursor = (
                    0 if index in behind else max(group.cursor, end) if since <= group.cursor else group.cursor
                )
        return merged._replace(new=new)

    def _learn_names(
        self, known: dict[bytes, KnownGroup], keys: list[bytes], message: Message, reply: Reply
    ) -> list[tuple[int, bytes]]:
        """Number the members that the reply names; gives the requests that are new, with their groups."""
        new, first, names = [], 0, list(map(tuple, reply.names.tolist()))
        for index in np.flatnonzero(reply.named).tolist():
            of_group, first = names[first : first + reply.named[index]], first + reply.named[index]
            # Of a reply that is late the first may be missing: its pieces are asked for again.
            if (group := known.get(keys[index])) is None or message.known[index] > len(group.members):
                continue
            for name in of_group[len(group.members) - message.known[index] :]:
                if name[0] == self.client:
                    group.members.append(-1)
                    continue
                if (number := group.numbers.get(name)) is None:
                    number = group.numbers[name] = self._new_number()
                    new.append((number, keys[index]))
                group.members.append(number)
        return new

    def _new_number(self) -> int:
        if self._free_numbers:
            number = self._free_numbers.pop()
        else:
            number, self._highest = self._highest, self._highest + 1
            if number == len(self._lengths):
                self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)])
        self._lengths[number] = 0
        return number
