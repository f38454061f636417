"""Requests to groups to automata: who shares what, and for how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sam.automaton import store
from sam.automaton.prompt_groups import Groups
from sam.automaton.store import NONE, blocks_for
from sam.drafting import batch, context_mixing
from sam.drafting.batch import append
from sam.drafting.corpus import SuffixAutomaton
from sam.drafting.token_ids import check_token_ids

SCOPES = ("request", "group", "history")
GRACE_TOKENS = 1 << 20  # of finished groups, kept for siblings that have not started yet
ROWS = 4096  # requests there is room for at first; doubled when they are more


@dataclass
class Drafts:
    """Drafts of a batch: those of request i are token_ids[offsets[i]:offsets[i + 1]].

    Attributes:
        token_ids: int32 [total].
        offsets: int64 [batch + 1].
        acceptance: float32 [total], cumulative acceptance probability: that of a token and all draft tokens before it.
        match_lengths: int32 [batch], length of the suffix drafted from.
    """

    token_ids: np.ndarray
    offsets: np.ndarray
    acceptance: np.ndarray
    match_lengths: np.ndarray


class Drafter:
    """Follows growing sequences and drafts for them.

    Args:
        max_draft_tokens: longest draft.
        scope: request (own text), group (all samples of a prompt), history (groups stay after they finish).
        history_tokens: tokens of finished groups kept with scope=history; those of old policies leave first, then the
            oldest.
        memory_budget_bytes: bound of all automata; finished groups go first, then requests get no drafts.
        corpus: file of `python -m sam.corpus build`, drafted from where its match is longer by more than `corpus_bias`.

    Raises:
        ValueError: a setting out of its range, or a corpus that cannot be read.
    """

    def __init__(
        self,
        *,
        max_draft_tokens: int,
        scope: str = "group",
        history_tokens: int = 0,
        memory_budget_bytes: int = 2 << 30,
        corpus: Path | None = None,
        corpus_bias: int = 5,
    ):
        if max_draft_tokens < 1:
            raise ValueError(f"max_draft_tokens={max_draft_tokens}: expected at least 1")
        if scope not in SCOPES:
            raise ValueError(f"scope={scope!r}: expected one of {', '.join(SCOPES)}")
        self.max_draft_tokens, self.scope, self.corpus_bias = max_draft_tokens, scope, corpus_bias
        self.store = store.make_store(memory_budget_bytes // store.BLOCK_BYTES)
        kept_tokens = history_tokens if scope == "history" else 0 if scope == "request" else GRACE_TOKENS
        self.groups = Groups(self.store, kept_tokens)
        self.corpus = SuffixAutomaton.load(corpus).store if corpus else SuffixAutomaton(store.BLOCK_BYTES, 1, 1).store
        self.weights, self.room = context_mixing.make_weights(), context_mixing.make_room()
        # Row 0 belongs to no request: prompts are appended with it.
        self.sequences = context_mixing.make_sequences(ROWS, max_draft_tokens)
        self._rows: dict[str, int] = {}
        self._free_rows = list(range(ROWS - 1, 0, -1))
        self._group_of: dict[int, int] = {}
        self.counters = {"overflow_requests": 0, "evicted_groups": 0}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    def __len__(self) -> int:
        """Requests followed."""
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes of all automata."""
        return self.groups.nbytes

    def start(self, request_id: str, prompt_token_ids: np.ndarray, policy_version: int = 0) -> None:
        """Follow a new request.

        Args:
            request_id: any name that is not followed yet.
            prompt_token_ids: int32 [length], not empty.
            policy_version: of the weights that will write the response; groups of lower ones leave the history first.

        Raises:
            ValueError: a request already followed; a prompt that is empty, too long for the memory budget, or not of
                token ids.
        """
        if request_id in self._rows:
            raise ValueError(f"request {request_id!r} is followed already: finish or abort it first")
        prompt = check_token_ids(prompt_token_ids, f"prompt of request {request_id!r}")
        if prompt.size == 0:
            raise ValueError(f"prompt of request {request_id!r}: expected at least one token id")
        if blocks_for(prompt.size) > len(self.store.groups):
            raise ValueError(
                f"prompt of request {request_id!r}: {prompt.size} tokens do not fit into memory_budget_bytes="
                f"{len(self.store.groups) * store.BLOCK_BYTES}"
            )
        group = self._group(prompt)
        row = self._rows[request_id] = self._free_row()
        if group == NONE:
            self.counters["overflow_requests"] += 1
            context_mixing.start(self.sequences, row, NONE, 0, prompt.size)
            return
        self.groups.join(group, policy_version)
        self._group_of[row] = group
        context_mixing.start(self.sequences, row, group, self.groups.prompt_end[group], prompt.size)
        batch.follow_corpus(
            self.corpus.records, self.corpus.heads, self.corpus.sizes, self.sequences, row, prompt, 0, prompt.size
        )

    def _free_row(self) -> int:
        if not self._free_rows:
            rows = len(self.sequences)
            self.sequences = np.concatenate([self.sequences, np.zeros_like(self.sequences)])
            self._free_rows = list(range(2 * rows - 1, rows - 1, -1))
        return self._free_rows.pop()

    def _group(self, prompt: np.ndarray) -> int:
        """The prompt's group, a new one if need be; NONE if there is no room for it."""
        group = NONE if self.scope == "request" else self.groups.find(prompt)
        if group != NONE:
            return group
        self._make_room(blocks_for(prompt.size))
        group = self.groups.add(prompt)
        if group != NONE:
            context_mixing.start(self.sequences, 0, group, self.groups.root(group), 0)
            append(*self.store, self.weights, self.room, self.sequences, 0, prompt, 0, prompt.size)
            self.groups.prompt_end[group] = int(self.sequences[0, context_mixing.END])
        return group

    def append(self, request_ids: Sequence[str], token_ids: np.ndarray, offsets: np.ndarray) -> None:
        """As `step`, without drafts."""
        self._append(self._rows_of(request_ids), token_ids, offsets)

    def catch_up(self, request_id: str, token_ids: np.ndarray) -> None:
        """Append what is new in `token_ids`, the whole sequence, after a time in which the request was not followed."""
        new = np.asarray(token_ids)[self.num_tokens(request_id) :]
        self.append([request_id], new, np.array([0, len(new)]))

    resume = catch_up

    def draft(self, request_ids: Sequence[str], budgets: np.ndarray, min_acceptance: float = 0.0) -> Drafts:
        """As `step`, with nothing to append."""
        return self._draft(self._rows_of(request_ids), budgets, min_acceptance)

    def step(self, request_ids, token_ids, offsets, budgets, min_acceptance: float = 0.0) -> Drafts:
        """Append each request's new tokens, then draft up to its budget: siblings see each other's tokens.

        Args:
            request_ids: of the batch.
            token_ids: int32 [total], the requests' new tokens, one request after the other.
            offsets: int64 [batch + 1], where each request's begin.
            budgets: int32 [batch], draft tokens at most.
            min_acceptance: drafts end before a token that is less likely to be accepted.

        Raises:
            ValueError: a request that is not followed, something else than token ids, or lengths that do not agree.
        """
        rows = self._rows_of(request_ids)
        self._append(rows, token_ids, offsets)
        return self._draft(rows, budgets, min_acceptance)

    def _rows_of(self, request_ids: Sequence[str]) -> np.ndarray:
        try:
            return np.array([self._rows[request_id] for request_id in request_ids], dtype=np.int64)
        except KeyError as error:
            raise ValueError(f"request {error.args[0]!r} is not followed: start it first") from None

    def _append(self, rows: np.ndarray, token_ids, offsets) -> None:
        # The kernel looks for negative tokens itself; anything but int32 goes the long way.
        tokens = np.asarray(token_ids)
        tokens = tokens if tokens.dtype == np.int32 else check_token_ids(tokens, "step")
        self._make_room(len(rows) + len(tokens) // store.BLOCK_TOKENS)
        arguments = (self.store, self.corpus, self.weights, self.room, self.sequences)
        lost = batch.append_all(*arguments, rows, tokens, np.asarray(offsets, np.int64))
        if lost == -1:
            check_token_ids(tokens, "step")
        if lost == -2:
            raise ValueError(
                f"offsets {np.asarray(offsets)[:8]}: expected {len(rows) + 1}, rising from 0 to {len(tokens)}"
            )
        self.counters["overflow_requests"] += lost

    def _draft(self, rows: np.ndarray, budgets: np.ndarray, min_acceptance: float) -> Drafts:
        if len(budgets) != len(rows):
            raise ValueError(f"{len(budgets)} budgets for {len(rows)} requests: expected one for each")
        arguments = (self.store, self.corpus, self.weights, self.room, self.sequences)
        tokens, acceptance, offsets, matches = batch.draft_all(
            *arguments,
            rows,
            np.asarray(budgets, np.int64),
            self.max_draft_tokens,
            float(min_acceptance),
            self.corpus_bias,
        )
        return Drafts(tokens, offsets, acceptance, matches)

    def finish(self, request_id: str) -> None:
        """Stop following; the response stays in its group while the group stays.

        Raises:
            ValueError: a request that is not followed.
        """
        row = int(self._rows_of([request_id])[0])
        del self._rows[request_id]
        self._free_rows.append(row)
        group = self._group_of.pop(row, NONE)
        if group != NONE:
            dropped = self.groups.leave(group)
            self.counters["evicted_groups"] += dropped if self.scope != "request" else 0

    abort = finish

    def lengths(self, request_ids: Sequence[str]) -> np.ndarray:
        """int64 [batch], tokens of each request that have been appended, the prompt's included."""
        return self.sequences[self._rows_of(request_ids), context_mixing.NUM_TOKENS]

    def num_tokens(self, request_id: str) -> int:
        return int(self.lengths([request_id])[0])

    def _make_room(self, needed: int) -> None:
        """Let idle groups go until `needed` blocks are free."""
        while self.groups.free_blocks < needed and self.groups.evict():
            self.counters["evicted_groups"] += 1

    def warm_up(self) -> None:
        """Compile every kernel, so that no step waits for it."""
        other = Drafter(max_draft_tokens=self.max_draft_tokens, memory_budget_bytes=1 << 20)
        for name in ("a", "b"):
            other.start(name, np.array([1, 2, 1], dtype=np.int32))
        tokens, budgets = np.arange(100, dtype=np.int32) % 7, np.full(2, self.max_draft_tokens)
        other.step(["a", "b"], tokens, np.array([0, 50, 100]), budgets)
        for name in ("a", "b"):
            other.finish(name)
        other.groups.evict()
