"""Follows the requests of an engine, each in the automaton of its group, and drafts for them."""

import contextlib
from collections.abc import Iterable, Sequence

import numpy as np

from sam.automaton import store
from sam.automaton.prompt_groups import Groups, walk
from sam.automaton.store import NONE, blocks_for, extend, reserve
from sam.config import SCOPES, SpeculationConfig
from sam.drafting.context_mixing import draft, learn, make_learned
from sam.drafting.prompt_memory import BUDGET_SHARE, corpus_tag, make_memory, nothing, prompt_tag, recall, remember
from sam.drafting.texts import (
    RECENT_TOKENS,
    Drafts,
    Sequences,
    check_token_ids,
    make_sequences,
    start_sequence,
    update_calibration,
)
from sam.jit import compiled, compiled_for_threads, kernel

PROMPT_SLOT = 0  # belongs to no request: prompts are appended with it
GRACE_TOKENS = 1 << 20  # of finished groups, kept for siblings that have not started yet
SPARE_SHARE = 64  # of all blocks one in so many is kept free of finished groups while requests run
NOTHING = np.empty(0, np.int32)
SLOTS = 4096  # requests that can be followed at first; doubled when there are more


@kernel
def append(store, memory, learned, sequences, slot, tokens, first, last):
    """Append tokens[first:last], for which the group has reserved space, and learn from them.

    How far the memory of other prompts is right is learnt from responses: most prompts begin as others do.
    """
    update_calibration(learned.acceptance, sequences, slot, tokens, first, last)
    text = sequences.texts[slot]
    for i in range(first, last):
        token = np.int64(tokens[i])
        recalled = recall(memory, sequences, slot, 0) if slot != PROMPT_SLOT else nothing()
        learn(store, learned.mixing, text, recalled, token)
        remember(memory, sequences, slot, token)
        sequences.recent_tokens[slot, text.num_tokens % RECENT_TOKENS] = token
        text.end = extend(store, text.group, text.end, token)
        text.num_tokens += 1


@compiled
def append_all(store, memory, learned, sequences, slots, tokens, offsets):
    """Append each slot's new tokens, tokens[offsets[i]:offsets[i + 1]]; a slot without a free block loses its group.

    Returns:
        The number of slots that did.

    Raises:
        ValueError: with nothing changed, for what cannot be.
    """
    for token in tokens:
        if token < 0:
            raise ValueError("append: expected token ids from 0 to 2**31 - 1")
    if offsets.size != slots.size + 1 or offsets[0] != 0 or offsets[-1] != tokens.size or np.any(np.diff(offsets) < 0):
        raise ValueError("append: expected offsets of each request and the end, rising from 0 to the number of tokens")
    lost = 0
    for i in range(slots.size):
        text = sequences.texts[slots[i]]
        first = offsets[i]
        last = offsets[i + 1]
        if text.group != NONE and not reserve(store, text.group, last - first):
            text.group = NONE
            lost += 1
        if text.group != NONE and last > first:
            append(store, memory, learned, sequences, slots[i], tokens, first, last)
        elif text.group == NONE:
            text.num_tokens += last - first
    return lost


@compiled
def remember_text(memory, sequences, slot, tokens):
    """Write the slot's next tokens (int32 [length]) into the memory of other prompts, and nowhere else."""
    text = sequences.texts[slot]
    for token in tokens:
        remember(memory, sequences, slot, np.int64(token))
        sequences.recent_tokens[slot, text.num_tokens % RECENT_TOKENS] = token
        text.num_tokens += 1


@compiled_for_threads
def append_elsewhere(store, memory, learned, sequences, slots, tokens, offsets):
    """As `append_all`; the engine's thread goes on meanwhile."""
    return append_all(store, memory, learned, sequences, slots, tokens, offsets)


@compiled
def draft_all(store, memory, learned, sequences, slots, budgets, min_acceptance):
    """Draft for each slot up to its budget.

    Returns:
        int32 [total] tokens, float32 [total] cumulative acceptance probabilities, int64 [slots + 1] where each slot's
        begin.
    """
    longest = sequences.draft_tokens.shape[1]
    tokens = np.empty(slots.size * longest, np.int32)
    acceptance = np.empty(slots.size * longest, np.float32)
    offsets = np.zeros(slots.size + 1, np.int64)
    texts = sequences.texts
    draft_tokens = sequences.draft_tokens
    draft_acceptance = sequences.draft_acceptance
    for i in range(slots.size):
        slot = slots[i]
        end = offsets[i]
        budget = min(np.int64(budgets[i]), longest)
        if texts[slot].group != NONE and budget > 0:
            draft(store, memory, learned, sequences, slot, budget, min_acceptance)
            for position in range(texts[slot].num_drafted):
                tokens[end] = draft_tokens[slot, position]
                acceptance[end] = draft_acceptance[slot, position]
                end += 1
        offsets[i + 1] = end
    return tokens[: offsets[-1]], acceptance[: offsets[-1]], offsets


class Drafter:
    """Follows growing sequences and drafts for them.

    Args:
        scope: request (own text), group (all samples of a prompt), history (groups stay after they finish).
        history_tokens: tokens of finished groups kept with scope=history; the oldest leave first.
        memory_budget_bytes: bound of all automata and of the memory of other prompts; finished groups go first, then
            requests get no drafts.
        cross_prompt: draft from what other prompts' texts had in common lately, too.

    Example:
        >>> drafter = Drafter(max_draft_tokens=3)
        >>> drafter.start("a", np.array([5, 6, 7, 8]))
        >>> drafter.start("b", np.array([5, 6, 7, 8]))
        >>> drafter.append(["a", "b"], np.array([5, 6, 9]), offsets=[0, 2, 3])
        >>> drafts = drafter.draft(["a", "b"], budgets=[3, 1])
        >>> drafts.token_ids, drafts.offsets
        (array([7, 8, 5, 6], dtype=int32), array([0, 3, 4]))
        >>> drafts.acceptance.round(2)
        array([0.73, 0.48, 0.2 , 0.38], dtype=float32)
    """

    def __init__(
        self,
        *,
        max_draft_tokens: int,
        scope: str = SpeculationConfig.scope,
        history_tokens: int = 0,
        memory_budget_bytes: int = SpeculationConfig.memory_budget_mib << 20,
        cross_prompt: bool = SpeculationConfig.cross_prompt,
    ):
        if max_draft_tokens < 1:
            raise ValueError(f"max_draft_tokens={max_draft_tokens}: expected at least 1")
        if scope not in SCOPES:
            raise ValueError(f"scope={scope!r}: expected one of {', '.join(SCOPES)}")
        self.max_draft_tokens = max_draft_tokens
        self.scope = scope
        self.memory = make_memory(memory_budget_bytes // BUDGET_SHARE if cross_prompt else 0)
        held = sum(array.nbytes for array in self.memory)
        self.store = store.make_store((memory_budget_bytes - held) // store.BLOCK_BYTES)
        kept_tokens = {"request": 0, "group": GRACE_TOKENS, "history": history_tokens}[scope]
        self.groups = Groups(self.store, kept_tokens, self._group_dropped)
        self.learned = make_learned()
        self.sequences = make_sequences(SLOTS, max_draft_tokens)
        self._slots: dict[str, int] = {}
        self._free_slots = list(range(SLOTS - 1, PROMPT_SLOT, -1))
        self._group_of: dict[int, int] = {}  # by slot
        self.counters = {"overflow_requests": 0, "evicted_groups": 0}

    @property
    def nbytes(self) -> int:
        """Bytes of all automata in use."""
        return self.groups.nbytes

    def start(self, request_id: str, prompt_token_ids: np.ndarray, given: np.ndarray = NOTHING) -> None:
        """Follow a new request.

        Args:
            prompt_token_ids: int32 [length], not empty.
            given: int32 [length], what it goes on with, as a conversation's next turn does. Of this, what the group has
                is not appended again; the rest is to be appended (`lengths`).

        Raises:
            ValueError: a request already followed; a prompt that is empty, too long for the memory budget, or not of
                token ids.
        """
        if request_id in self._slots:
            raise ValueError(f"request {request_id!r} is followed already: finish it first")
        prompt = check_token_ids(prompt_token_ids, f"prompt of request {request_id!r}")
        if prompt.size == 0:
            raise ValueError(f"prompt of request {request_id!r}: expected at least one token id")
        if blocks_for(prompt.size) > len(self.store.blocks):
            raise ValueError(
                f"prompt of request {request_id!r}: {prompt.size} tokens do not fit into memory_budget_bytes="
                f"{len(self.store.blocks) * store.BLOCK_BYTES}"
            )
        tag = prompt_tag(prompt)
        group = self._group(prompt, tag)
        slot = self._slots[request_id] = self._free_slot()
        if group == NONE:
            self.counters["overflow_requests"] += 1
            start_sequence(self.sequences, slot, NONE, 0, prompt, tag)
            return
        self.groups.join(group)
        self._group_of[slot] = group
        end, known = walk(self.store, self.groups.prompt_end[group], given)
        start_sequence(self.sequences, slot, group, end, np.concatenate([prompt, given[:known]]), tag)

    def _free_slot(self) -> int:
        if not self._free_slots:
            slots = len(self.sequences.texts)
            self.sequences = Sequences(*(np.concatenate([array, np.zeros_like(array)]) for array in self.sequences))
            self._free_slots = list(range(2 * slots - 1, slots - 1, -1))
        return self._free_slots.pop()

    def _group(self, prompt: np.ndarray, tag: int) -> int:
        """The prompt's group, a new one if need be; NONE if no memory is left for it."""
        group = NONE if self.scope == "request" else self.groups.find(prompt)
        if group != NONE:
            return group
        self._free_blocks(blocks_for(prompt.size))
        group = self.groups.add(prompt)
        if group != NONE:
            start_sequence(self.sequences, PROMPT_SLOT, group, self.groups.root(group), prompt[:0], tag)
            self.groups.prompt_end[group] = self._append_to_prompt_slot(prompt)
        return group

    def _append_to_prompt_slot(self, tokens: np.ndarray) -> int:
        """Append text of no request; returns the state in which it ends."""
        offsets = np.array([0, tokens.size])
        self._append_all(append_all, np.array([PROMPT_SLOT]), tokens, offsets)
        return int(self.sequences.texts[PROMPT_SLOT]["end"])

    def append(self, request_ids: Sequence[str], token_ids: np.ndarray, offsets: np.ndarray) -> None:
        """Append each request's new tokens: int32 [total], one request after the other, those of request i from
        offsets[i] to offsets[i + 1] (int64 [batch + 1]). ValueError for what is not followed, or does not fit."""
        slots = self.slots_of(request_ids)
        # The kernel looks for negative tokens itself.
        tokens = np.asarray(token_ids)
        tokens = tokens if tokens.dtype == np.int32 else check_token_ids(tokens, "append")
        # Beyond what is reserved: a group may take further blocks in the middle of a token.
        spare = len(self.store.blocks) // SPARE_SHARE
        self._free_blocks(len(slots) + len(tokens) // store.BLOCK_TOKENS + spare)
        self.counters["overflow_requests"] += self._append_all(append_all, slots, tokens, np.asarray(offsets, np.int64))

    def draft(self, request_ids: Sequence[str], budgets: np.ndarray, min_acceptance: float = 0.0) -> Drafts:
        """Draft for each request from all that has been appended.

        Args:
            budgets: int32 [batch], draft tokens at most.
            min_acceptance: drafts end before a token whose cumulative acceptance probability is lower.
        """
        slots = self.slots_of(request_ids)
        if len(budgets) != len(slots):
            raise ValueError(f"{len(budgets)} budgets for {len(slots)} requests: expected one for each")
        tokens, acceptance, offsets = draft_all(
            self.store,
            self.memory,
            self.learned,
            self.sequences,
            slots,
            np.asarray(budgets, np.int64),
            float(min_acceptance),
        )
        return Drafts(tokens, offsets, acceptance)

    def finish(self, request_id: str) -> None:
        """Stop following; the response stays in its group while the group stays."""
        slot = int(self.slots_of([request_id])[0])
        del self._slots[request_id]
        self._free_slots.append(slot)
        group = self._group_of.pop(slot, NONE)
        if group != NONE:
            self._leave(group)

    def _leave(self, group: int) -> None:
        dropped = self.groups.leave(group)
        self.counters["evicted_groups"] += dropped if self.scope != "request" else 0

    def append_earlier(self, prompt: np.ndarray, token_ids: np.ndarray, is_start: bool = True) -> bool:
        """Append text of an earlier response to a prompt, which follows it or (not `is_start`) comes from further on.

        Requests that run have memory first. Returns whether it was appended: not if memory is short, or the prompt's
        group is dropped.
        """
        needed = blocks_for(token_ids.size) + len(self.store.blocks) // 8
        self._free_blocks(needed)
        group = self.groups.find(prompt)
        if group == NONE or self.groups.free_blocks < needed:
            return False
        begin = self.groups.prompt_end[group] if is_start else self.groups.root(group)
        known = prompt if is_start else prompt[:0]
        start_sequence(self.sequences, PROMPT_SLOT, group, begin, known, prompt_tag(prompt))
        self.groups.join(group)
        self._append_to_prompt_slot(token_ids)
        self._leave(group)
        return True

    def read_corpus(self, texts: Iterable[tuple[np.ndarray, np.ndarray]]) -> None:
        """Read prompts with a response each (int32 [length]) into the memory of other prompts, before the first
        request. Groups get nothing of them: there other prompts' text costs more drafts than it brings."""
        for prompt, response in texts:
            start_sequence(self.sequences, PROMPT_SLOT, NONE, 0, prompt, corpus_tag(prompt))
            remember_text(self.memory, self.sequences, PROMPT_SLOT, response)

    def _append_all(self, append, slots: np.ndarray, tokens: np.ndarray, offsets: np.ndarray) -> int:
        """What `append` returns. A group that memory is short for in the middle of a token is left for good: walking it
        might not end. Tokens that come behind are then missing, which `lengths` tells."""
        try:
            return append(self.store, self.memory, self.learned, self.sequences, slots, tokens, offsets)
        except MemoryError:
            group = int(self.store.counters[0]["torn_group"])
            texts = self.sequences.texts
            texts["group"][texts["group"] == group] = NONE
            users = [slot for slot, user_group in self._group_of.items() if user_group == group]
            self.counters["overflow_requests"] += len(users)
            for slot in users:
                del self._group_of[slot]
            self.groups.drop(group)
            raise

    def reading(self) -> contextlib.AbstractContextManager:
        """To be held while anything but this class reads what it holds."""
        return contextlib.nullcontext()

    def _group_dropped(self, group: int) -> None:
        """A hook: the group's blocks are given back."""

    def slots_of(self, request_ids: Sequence[str]) -> np.ndarray:
        """int64 [batch], each request's place in `sequences`; ValueError if one is not followed."""
        try:
            return np.array([self._slots[request_id] for request_id in request_ids], dtype=np.int64)
        except KeyError as error:
            raise ValueError(f"request {error.args[0]!r} is not followed: start it first") from None

    def lengths(self, request_ids: Sequence[str]) -> np.ndarray:
        """int64 [batch], tokens of each request that have been appended, the prompt's included."""
        return self.sequences.texts["num_tokens"][self.slots_of(request_ids)]

    def num_tokens(self, request_id: str) -> int:
        """As `lengths`, of one request."""
        return int(self.lengths([request_id])[0])

    def _free_blocks(self, needed: int) -> None:
        """Let idle groups go until `needed` blocks are free."""
        while self.groups.free_blocks < needed and self.groups.evict():
            self.counters["evicted_groups"] += 1

    def warm_up(self) -> None:
        """Compile every kernel, so that no step waits for it."""
        other = Drafter(max_draft_tokens=self.max_draft_tokens, memory_budget_bytes=1 << 20)
        prompt = np.array([1, 2, 1], np.int32)
        tokens = np.arange(100, dtype=np.int32) % 7
        for name in ("a", "b"):
            other.start(name, prompt)
        other.append(["a", "b"], tokens, np.array([0, 50, 100]))
        other.draft(["a", "b"], np.full(2, self.max_draft_tokens))
        for name in ("a", "b"):
            other.finish(name)
        other.groups.evict()
