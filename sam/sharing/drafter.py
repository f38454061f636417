"""A drafter whose groups also hold the text of siblings in other replicas."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from sam.automaton import store
from sam.automaton.store import NONE
from sam.config import SpeculationConfig
from sam.drafting import batch, origins
from sam.drafting.drafter import Drafter
from sam.drafting.drafts import Drafts
from sam.drafting.sequences import RECENT_TOKENS, start_sequence
from sam.drafting.token_ids import digest
from sam.sharing.arrivals import Arrivals
from sam.sharing.client import Client

COUNTERS = ("drafted_requests", "siblings_here", "siblings_elsewhere", "sharing_lag_tokens", "sharing_engine_ms")
TURN_SECONDS = 1e-4  # after which the client's thread looks again whether the engine's has had its turn
MARKS = 1024  # appends of which is remembered when they were
COUNT_EVERY = 8  # steps with drafts: counting siblings in each would take a fifth of sharing's time


class Turn:
    """A lock; how long the engine's thread waits for it is counted. The client's thread takes it as `of_client`."""

    def __init__(self, counters: dict[str, float]):
        self._lock, self._counters = threading.Lock(), counters
        self._is_awaited = False

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            began, self._is_awaited = time.perf_counter(), True
            try:
                self._lock.acquire()
            finally:
                self._is_awaited = False
            self._counters["sharing_engine_ms"] += (time.perf_counter() - began) * 1e3

    def __exit__(self, *_error) -> None:
        self._lock.release()

    @contextlib.contextmanager
    def of_client(self) -> Iterator[None]:
        """For the client's thread: behind it the engine's has its turn if it waits, for a lock is not fair."""
        with self._lock:
            yield
        while self._is_awaited:
            time.sleep(TURN_SECONDS)


class SharingDrafter(Drafter):
    """A Drafter that tells a client of its requests, while the client's thread appends what arrives.

    Without a client it is a Drafter. The two threads take turns: the engine's waits while a part of text is appended,
    a fraction of a millisecond, and only if the two meet. Text from elsewhere is learnt from as text that is written
    here. Counters, beside the client's: requests that drafts were asked for, and the siblings here and elsewhere that
    each of them had, summed over every COUNT_EVERY-th step; the tokens that a request here wrote, on average, from the
    question that brought the last text until it was appended; and the milliseconds that sharing took of the engine's
    thread, waiting for its turn included.
    """

    def __init__(self, **settings):
        super().__init__(**settings)
        self.client: Client | None = None
        self._turn = Turn(self.counters)
        self._slot_of = np.full(1024, -1, np.int64)  # by the client's number of a request elsewhere
        self._numbers: dict[int, list[tuple[int, int]]] = {}  # of those requests, with their slots, by group
        self._prompt_ends: dict[int, tuple[np.ndarray, int]] = {}  # of groups: last tokens, and the prompt's tag
        self._sibling_slots: dict[int, list[int]] = {}  # of requests elsewhere, by group
        self._keys: dict[int, bytes] = {}  # of groups, and the other way round
        self._group_of_key: dict[bytes, int] = {}
        groups = len(self.store.groups)
        self._written = 0.0  # tokens a request, on average
        self._marks: deque[tuple[float, float]] = deque(maxlen=MARKS)  # seconds, and `_written` then
        self._siblings_here, self._siblings_elsewhere = np.zeros((2, groups), np.int32)
        self._drafted_steps = 0

    def share(self, client: Client) -> None:
        """Share the requests that start from now on; the client counts where the drafter does."""
        self.counters.update(client.counters | dict.fromkeys(COUNTERS, 0))
        self.client, client.counters, client.receive = client, self.counters, self.append_arrived

    def start(self, request_id: str, prompt_token_ids: np.ndarray, policy_version: int = 0) -> None:
        """As Drafter's, and the siblings elsewhere of its prompt are followed."""
        with self._turn:
            self._start(request_id, prompt_token_ids, policy_version)

    def _start(self, request_id: str, prompt_token_ids: np.ndarray, policy_version: int) -> None:
        super().start(request_id, prompt_token_ids, policy_version)
        slot = self._slots[request_id]
        if (group := self._group_of.get(slot)) is None:
            return
        if group not in self._prompt_ends:
            last = np.array(prompt_token_ids[-RECENT_TOKENS:], np.int32)
            self._prompt_ends[group] = last, int(self.sequences.texts[slot]["prompt_tag"])
        if self.client is None:
            return
        began = time.perf_counter()
        if (key := self._keys.get(group)) is None:
            key = self._keys[group] = digest(prompt_token_ids)
            self._group_of_key[key] = group
        self._siblings_here[group] += 1
        self.client.put("start", slot, key, policy_version, len(prompt_token_ids))
        self._count_time(began)

    def finish(self, request_id: str) -> None:
        """As Drafter's."""
        with self._turn:
            slot = self._slots.get(request_id, -1)
            if self.client is not None and (group := self._group_of.get(slot)) is not None:
                began = time.perf_counter()
                self._siblings_here[group] -= 1
                self.client.put("finish", slot)
                self._count_time(began)
            super().finish(request_id)

    def append(self, request_ids: Sequence[str], token_ids: np.ndarray, offsets: np.ndarray) -> None:
        """As Drafter's."""
        with self._turn:
            super().append(request_ids, token_ids, offsets)

    def draft(self, request_ids: Sequence[str], budgets: np.ndarray, min_acceptance: float = 0.0) -> Drafts:
        """As Drafter's."""
        with self._turn:
            return super().draft(request_ids, budgets, min_acceptance)

    def step(self, request_ids, token_ids, offsets, budgets, min_acceptance: float = 0.0) -> Drafts:
        """As Drafter's."""
        with self._turn:
            return super().step(request_ids, token_ids, offsets, budgets, min_acceptance)

    def append_earlier(self, prompt: np.ndarray, token_ids: np.ndarray, is_start: bool = True) -> bool:
        """As Drafter's."""
        with self._turn:
            return super().append_earlier(prompt, token_ids, is_start)

    def reading(self) -> Turn:
        """As Drafter's: the client's thread waits."""
        return self._turn

    def _append(self, slots: np.ndarray, token_ids, offsets) -> None:
        positions = self.sequences.texts["num_tokens"][slots]
        super()._append(slots, token_ids, offsets)
        if self.client is not None:
            began = time.perf_counter()
            self.client.put("append", slots, positions, np.asarray(token_ids), np.asarray(offsets))
            self._written += len(token_ids) / max(1, len(slots))
            self._marks.append((self.client.now(), self._written))
            self._count_time(began)

    def _count_time(self, began: float) -> None:
        self.counters["sharing_engine_ms"] += (time.perf_counter() - began) * 1e3

    def append_arrived(self, part: Arrivals) -> None:
        """Append a part of what the client has received; called by its thread."""
        with self._turn.of_client():
            for number, key in part.new:
                self._start_elsewhere(number, key)
            self.append_siblings(self._slot_of[part.numbers], part.positions, part.tokens, part.offsets)
            before = next((written for seconds, written in reversed(self._marks) if seconds <= part.asked), 0.0)
            self.counters["sharing_lag_tokens"] = round(self._written - before)

    def start_sibling(self, group: int) -> int:
        """Follow a request that runs elsewhere, until its group is dropped.

        Args:
            group: of a request that is followed here.

        Returns:
            The slot to append its response to.
        """
        slot = self._free_slot()
        writer, end = origins.new_writer(self.groups, group, origins.ELSEWHERE), self.groups.prompt_end[group]
        start_sequence(self.sequences, slot, group, end, *self._prompt_ends[group], *writer)
        self._sibling_slots.setdefault(group, []).append(slot)
        return slot

    def append_siblings(self, slots: np.ndarray, positions: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> int:
        """Append to responses that are written elsewhere, and learn from them as from responses here.

        They get the memory that requests here do not need.

        Args:
            slots: int64 [pieces], of `start_sibling`, none twice; negative ones are left out.
            positions: int64 [pieces], where in its response each piece begins; left out unless the text ends there.
            tokens: int32 [total], the pieces, one after the other, of token ids.
            offsets: int64 [pieces + 1], where each piece begins, and the total.

        Returns:
            Tokens appended.
        """
        needed = len(slots) + len(tokens) // store.BLOCK_TOKENS + len(self.store.blocks) // 8
        self._free_blocks(needed)
        if self.groups.free_blocks < needed:
            return 0
        arguments = self.store, self.memory, self.learned, self.sequences
        with self._abandons_torn_group():
            return batch.append_siblings(*arguments, slots, positions, tokens, offsets)

    def _start_elsewhere(self, number: int, key: bytes) -> None:
        while number >= len(self._slot_of):
            self._slot_of = np.concatenate([self._slot_of, np.full_like(self._slot_of, -1)])
        if (group := self._group_of_key.get(key)) is not None:
            slot = self._slot_of[number] = self.start_sibling(group)
            self._numbers.setdefault(group, []).append((number, slot))
            self._siblings_elsewhere[group] += 1

    def _draft(self, slots: np.ndarray, budgets: np.ndarray, min_acceptance: float) -> Drafts:
        drafts = super()._draft(slots, budgets, min_acceptance)
        if self.client is not None and self._drafted_steps % COUNT_EVERY == 0:
            began = time.perf_counter()
            groups = self.sequences.texts["group"][slots[np.asarray(budgets) > 0]]
            groups = groups[groups >= 0]
            self.counters["drafted_requests"] += len(groups)
            self.counters["siblings_here"] += int(self._siblings_here[groups].sum()) - len(groups)
            self.counters["siblings_elsewhere"] += int(self._siblings_elsewhere[groups].sum())
            self._count_time(began)
        self._drafted_steps += 1
        return drafts

    def _abandon(self, group: int) -> None:
        if self.client is not None:
            for slot in [slot for slot, its in self._group_of.items() if its == group]:
                self.client.put("finish", slot)
        super()._abandon(group)

    def _group_dropped(self, group: int) -> None:
        self._prompt_ends.pop(group, None)
        slots = self._sibling_slots.pop(group, [])
        self.sequences.texts["group"][slots] = NONE
        self._free_slots += slots
        if (key := self._keys.pop(group, None)) is not None:
            del self._group_of_key[key]
            for number, slot in self._numbers.pop(group, ()):
                if self._slot_of[number] == slot:
                    self._slot_of[number] = -1
            self._siblings_here[group] = self._siblings_elsewhere[group] = 0
            self.client.put("forget", key)

    def warm_up(self) -> None:
        """Compile every kernel, so that no step waits for it."""
        super().warm_up()
        other = SharingDrafter(max_draft_tokens=self.max_draft_tokens, memory_budget_bytes=1 << 20)
        other.start("a", np.array([1, 2, 1], np.int32))
        slots, positions = np.array([other.start_sibling(other._group_of[other._slots["a"]])]), np.zeros(1, np.int64)
        other.append_siblings(slots, positions, np.arange(100, dtype=np.int32) % 7, np.array([0, 100]))


def make_drafter(config: SpeculationConfig, max_draft_tokens: int) -> Drafter:
    """The drafter that a config asks for; it shares where `sharing` is replicas."""
    return (SharingDrafter if config.sharing == "replicas" else Drafter)(
        max_draft_tokens=max_draft_tokens,
        scope=config.scope,
        history_tokens=config.history_tokens,
        memory_budget_bytes=config.memory_budget_mib << 20,
        corpus=Path(config.corpus) if config.corpus else None,
        min_extra_match_len=config.min_extra_match_len,
        cross_prompt=config.cross_prompt,
    )
