"""A drafter whose groups also hold the text of siblings in other replicas."""

import contextlib
import logging
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from sam.automaton import store
from sam.automaton.store import NONE
from sam.config import SpeculationConfig
from sam.drafting.drafter import NOTHING, Drafter, append_elsewhere
from sam.drafting.texts import RECENT_TOKENS, digest, start_sequence
from sam.record.corpus import read_corpus
from sam.sharing.client import COUNTERS, Client
from sam.sharing.link import Link
from sam.sharing.log import Piece

logger = logging.getLogger(__name__)


@dataclass
class SharedGroup:
    """A group as other replicas know it, with the last tokens of its prompt and the slots of requests elsewhere."""

    key: bytes
    last_tokens: np.ndarray
    prompt_tag: int
    slots: dict[Hashable, int] = field(default_factory=dict)


class SharingDrafter(Drafter):
    """A Drafter that tells a client of its requests, while the client's thread appends what arrives.

    Without a client it is a Drafter. The two threads take turns: the engine's waits while a part of text is appended,
    a fraction of a millisecond, and only if the two meet. Text from elsewhere is learnt from as text that is written
    here.
    """

    def __init__(self, **settings):
        super().__init__(**settings)
        self.client: Client | None = None
        self._lock = threading.Lock()
        self._shared: dict[int, SharedGroup] = {}  # by group
        self._group_of_key: dict[bytes, int] = {}

    def share(self, client: Client) -> None:
        """Share the requests that start from now on; the client counts where the drafter does."""
        self.counters.update(dict.fromkeys(COUNTERS, 0))
        self.client = client
        client.counters = self.counters
        client.receive = self.append_arrived

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Held by the engine's thread; how long it waits for it is counted."""
        if not self._lock.acquire(blocking=False):
            began = time.perf_counter()
            self._lock.acquire()
            self.counters["sharing_engine_ms"] += (time.perf_counter() - began) * 1e3
        try:
            yield
        finally:
            self._lock.release()

    def _tell(self, event: str, *arguments) -> None:
        if self.client is not None:
            self.client.put(event, *arguments)

    def start(self, request_id: str, prompt_token_ids: np.ndarray, given: np.ndarray = NOTHING) -> None:
        """Follow a new request, and the siblings elsewhere of its prompt; arguments and errors as of Drafter.start."""
        with self._turn():
            super().start(request_id, prompt_token_ids, given)
            slot = self._slots[request_id]
            group = self._group_of.get(slot)
            if group is None:
                return
            if group not in self._shared:
                key = digest(prompt_token_ids)
                last = np.array(prompt_token_ids[-RECENT_TOKENS:], np.int32)
                self._shared[group] = SharedGroup(key, last, int(self.sequences.texts[slot]["prompt_tag"]))
                self._group_of_key[key] = group
            begin = len(prompt_token_ids)
            self._tell("start", slot, self._shared[group].key, begin)
            known = self.num_tokens(request_id) - begin
            if known:  # others may not have it
                self._tell("append", np.array([slot]), np.array([begin]), given[:known], np.array([0, known]))

    def finish(self, request_id: str) -> None:
        """Stop following, and sharing; errors as of Drafter.finish."""
        with self._turn():
            self._tell("finish", self._slots.get(request_id, -1))
            super().finish(request_id)

    def draft(self, *arguments, **named):
        """As Drafter.draft, while no text from elsewhere is appended."""
        with self._turn():
            return super().draft(*arguments, **named)

    def append_earlier(self, *arguments, **named):
        """As Drafter.append_earlier, while no text from elsewhere is appended."""
        with self._turn():
            return super().append_earlier(*arguments, **named)

    def reading(self) -> contextlib.AbstractContextManager:
        """To be held while anything but this class reads what it holds: the client's thread waits."""
        return self._turn()

    def append(self, request_ids: Sequence[str], token_ids: np.ndarray, offsets: np.ndarray) -> None:
        """Append each request's new tokens, and share them; arguments and errors as of Drafter.append."""
        with self._turn():
            slots = self.slots_of(request_ids)
            positions = self.sequences.texts["num_tokens"][slots]
            super().append(request_ids, token_ids, offsets)
            self._tell("append", slots, positions, np.asarray(token_ids), np.asarray(offsets))

    def append_arrived(self, part: list[Piece]) -> int:
        """Append text of requests elsewhere, and learn from it as from that of requests here; for the client's thread.

        It gets the memory that requests here do not need. What is of no group that is followed here, or does not begin
        where its response ends, is left out.

        Returns:
            Tokens appended.
        """
        size = sum(len(piece.tokens) for piece in part)
        needed = len(part) + size // store.BLOCK_TOKENS + len(self.store.blocks) // 8
        with self._lock:
            self._free_blocks(needed)
            if self.groups.free_blocks < needed:
                return 0
            return sum(map(self._append_piece, part))

    def _append_piece(self, piece: Piece) -> int:
        """Returns the number of tokens appended."""
        slot = self._slot_elsewhere(piece)
        size = len(piece.tokens)
        text = self.sequences.texts[slot]
        if slot < 0 or text["group"] == NONE or text["num_tokens"] - text["num_prompt_tokens"] != piece.position:
            return 0
        tokens = np.array(piece.tokens, np.int32)
        offsets = np.array([0, size])
        return 0 if self._append_all(append_elsewhere, np.array([slot]), tokens, offsets) else size

    def _slot_elsewhere(self, piece: Piece) -> int:
        """Of a response elsewhere, which keeps it until its group is dropped; -1 if that is not followed here."""
        group = self._group_of_key.get(piece.key)
        if group is None:
            return -1
        shared = self._shared[group]
        if piece.name not in shared.slots:
            slot = self._free_slot()
            end = self.groups.prompt_end[group]
            start_sequence(self.sequences, slot, group, end, shared.last_tokens, shared.prompt_tag)
            shared.slots[piece.name] = slot
        return shared.slots[piece.name]

    def _group_dropped(self, group: int) -> None:
        shared = self._shared.pop(group, None)
        if shared is None:
            return
        slots = list(shared.slots.values())
        self.sequences.texts["group"][slots] = NONE
        self._free_slots += slots
        del self._group_of_key[shared.key]
        self._tell("forget", shared.key)

    def warm_up(self) -> None:
        """Compile every kernel, so that no step waits for it."""
        super().warm_up()
        other = SharingDrafter(max_draft_tokens=self.max_draft_tokens, memory_budget_bytes=1 << 20)
        prompt = np.array([1, 2, 1], np.int32)
        tokens = np.arange(100, dtype=np.int32) % 7
        other.start("a", prompt)
        other.append_arrived([Piece(digest(prompt), "b", 0, tokens)])


def make_drafter(config: SpeculationConfig, max_draft_tokens: int) -> Drafter:
    """The drafter that a config asks for; it shares where `sharing` is replicas."""
    kind = SharingDrafter if config.sharing == "replicas" else Drafter
    return kind(
        max_draft_tokens=max_draft_tokens,
        scope=config.scope,
        history_tokens=config.history_tokens,
        memory_budget_bytes=config.memory_budget_mib << 20,
        cross_prompt=config.cross_prompt,
    )


def read_corpus_into(drafter: Drafter, config: SpeculationConfig, model_config) -> None:
    """Let a drafter read the corpus of its config, if there is one; `model_config` is vLLM's.

    Raises:
        ReadError: it cannot be read, or is of another tokenizer.
    """
    if not config.corpus:
        return
    began = time.perf_counter()
    tokenizer = str(model_config.tokenizer)
    texts = read_corpus(config.corpus, config.history_tokens, tokenizer, model_config.get_vocab_size())
    drafter.read_corpus(texts)
    tokens = sum(len(response) for _prompt, response in texts)
    logger.info("corpus: %d responses, %d tokens, read in %.1f s", len(texts), tokens, time.perf_counter() - began)


def share_by_link(drafter: Drafter, address: str) -> bool:
    """Let a drafter exchange text with those of other replicas from now on, through the server that listens at
    `address` (sam.sharing.link); False if its settings ask for no sharing."""
    if not isinstance(drafter, SharingDrafter):
        return False
    client = Client(Link(address).ask)
    drafter.share(client)
    client.start()
    return True
