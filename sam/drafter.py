"""Requests to groups to automata: who shares what, and for how long."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sam.automaton import Arena, step_batch

SCOPES = ("request", "group", "history")
GRACE_TOKENS = 1 << 20  # finished groups kept for siblings that have not started yet


@dataclass
class Drafts:
    """Drafts of a batch: those of request i are token_ids[offsets[i]:offsets[i + 1]].

    Attributes:
        token_ids: int32 [total].
        offsets: int64 [batch + 1].
        survival: float32 [total], estimated probability that a token and all before it are accepted.
        match_lengths: int32 [batch], length of the suffix drafted from.
    """

    token_ids: np.ndarray
    offsets: np.ndarray
    survival: np.ndarray
    match_lengths: np.ndarray


@dataclass
class _Request:
    group: Arena
    end: int
    tokens: int


class Drafter:
    """Follows up to `max_live_requests` growing sequences and drafts for them.

    Args:
        max_draft_tokens: longest draft.
        scope: request (own text), group (all samples of a prompt), history (groups stay after they finish).
        history_tokens: tokens of finished groups kept with scope=history, oldest out first.
        memory_budget_bytes: bound of all automata; finished groups go first, then requests get no drafts.
        max_live_requests: groups started beyond this many live requests get no drafts.
    """

    def __init__(
        self,
        *,
        max_draft_tokens: int,
        scope: str = "group",
        history_tokens: int = 0,
        memory_budget_bytes: int = 2 << 30,
        max_live_requests: int = 4096,
    ):
        if max_draft_tokens < 1:
            raise ValueError(f"max_draft_tokens={max_draft_tokens}: expected at least 1")
        if scope not in SCOPES:
            raise ValueError(f"scope={scope!r}: expected one of {', '.join(SCOPES)}")
        self.max_draft_tokens = max_draft_tokens
        self.scope = scope
        self.kept_tokens = history_tokens if scope == "history" else GRACE_TOKENS
        self.memory_budget_bytes = memory_budget_bytes
        self.max_live_requests = max_live_requests
        self._requests: dict[str, _Request] = {}
        self._groups: OrderedDict[bytes, Arena] = OrderedDict()
        self._nbytes = 0
        self.counters = {"overflow_requests": 0, "evicted_groups": 0}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def nbytes(self) -> int:
        """Bytes of all automata; while one grows, its old arrays exist beside the new ones."""
        return self._nbytes

    def start(self, request_id: str, prompt_token_ids: np.ndarray, policy_version: int = 0) -> None:
        """Follow a new request. `prompt_token_ids`: int32 [length], not empty.

        Raises:
            ValueError: empty prompt, negative token, or a request already followed.
        """
        prompt = np.ascontiguousarray(prompt_token_ids, dtype=np.int32)
        if request_id in self._requests:
            raise ValueError(f"request {request_id!r} is followed already: finish or abort it first")
        if prompt.size == 0 or prompt.min() < 0:
            raise ValueError(f"prompt of request {request_id!r}: expected at least one token id, none negative")
        key = prompt.tobytes() if self.scope != "request" else request_id.encode() + b"/" + prompt.tobytes()
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = Arena(key)
            if len(self._requests) >= self.max_live_requests:
                group.freeze()
        self._groups.move_to_end(key)
        request = self._requests[request_id] = _Request(group, group.root, 0)
        group.live += 1
        if group.prompt_end is None:
            self._step([request], prompt, np.array([0, prompt.size]), np.zeros(1, np.int32))
            group.prompt_end = request.end
        request.end, request.tokens = group.prompt_end, prompt.size
        self.counters["overflow_requests"] += group.frozen

    def append(self, request_ids: Sequence[str], token_ids: np.ndarray, offsets: np.ndarray) -> None:
        self.step(request_ids, token_ids, offsets, np.zeros(len(request_ids), dtype=np.int32))

    def draft(self, request_ids: Sequence[str], budgets: np.ndarray) -> Drafts:
        return self.step(request_ids, np.empty(0, np.int32), np.zeros(len(request_ids) + 1, np.int64), budgets)

    def step(self, request_ids, token_ids, offsets, budgets, min_survival: float = 0.0) -> Drafts:
        """Append each request's new tokens, then draft up to its budget: one compiled call for the whole batch.

        Args:
            request_ids: of the batch.
            token_ids: int32 [total], the requests' new tokens, one request after the other.
            offsets: int64 [batch + 1], where each request's begin.
            budgets: int32 [batch], draft tokens at most.
            min_survival: drafts end before a token that is less likely to be accepted.
        """
        requests = [self._requests[request_id] for request_id in request_ids]
        return self._step(requests, token_ids, offsets, budgets, min_survival)

    def _step(self, requests: list[_Request], token_ids, offsets, budgets, min_survival: float = 0.0) -> Drafts:
        batch, longest = len(requests), self.max_draft_tokens
        lengths = np.diff(offsets).tolist()
        self._reserve(requests, lengths)
        ends = np.array([request.end for request in requests], dtype=np.int64)
        addresses = np.array([request.group.address for request in requests], dtype=np.int64).reshape(batch, -1)
        out = np.empty((batch, longest), dtype=np.int32)
        survival = np.empty((batch, longest), dtype=np.float32)
        counts, matches = np.zeros(batch, dtype=np.int64), np.zeros(batch, dtype=np.int32)
        step_batch(
            addresses,
            ends,
            np.asarray(token_ids, np.int32),
            np.asarray(offsets, np.int64),
            np.minimum(budgets, longest).astype(np.int32),
            float(min_survival),
            out,
            survival,
            counts,
            matches,
        )
        for request, end, length in zip(requests, ends.tolist(), lengths, strict=True):
            request.end = end
            request.tokens += length
        keep = np.arange(longest)[None, :] < counts[:, None]
        return Drafts(out[keep], np.concatenate([[0], np.cumsum(counts)]), survival[keep], matches)

    def _reserve(self, requests: list[_Request], lengths: list[int]) -> None:
        """Room for the batch's new tokens; a group without it is frozen."""
        added: dict[int, int] = {}
        for request, length in zip(requests, lengths, strict=True):
            if length:
                added[id(request.group)] = added.get(id(request.group), 0) + length
        for request in requests:
            if tokens := added.pop(id(request.group), 0):
                self._make_room(request.group, tokens)

    def finish(self, request_id: str) -> None:
        """Stop following; the response stays in its group while the group stays."""
        group = self._requests.pop(request_id).group
        group.live -= 1
        if group.live == 0 and (self.scope == "request" or group.frozen):
            self._drop(group)
        self._evict_beyond_kept_tokens()

    abort = finish

    def num_tokens(self, request_id: str) -> int:
        return self._requests[request_id].tokens

    def _make_room(self, group: Arena, tokens: int) -> None:
        """Grow `group` within the memory budget, idle groups going first; else freeze it for good."""
        if group.frozen:
            return
        needed = Arena.bytes_for(group.capacity_with(tokens)) - group.nbytes
        if self._nbytes + needed > self.memory_budget_bytes:
            self._evict_until(self.memory_budget_bytes - needed)
        if self._nbytes + needed > self.memory_budget_bytes:
            group.freeze()
            self.counters["overflow_requests"] += group.live
            return
        group.reserve(tokens)
        self._nbytes += needed

    def _idle(self) -> list[Arena]:
        return [group for group in self._groups.values() if group.live == 0]

    def _evict_until(self, limit: int) -> None:
        for group in self._idle():
            if self._nbytes <= limit:
                return
            self._drop(group)

    def _evict_beyond_kept_tokens(self) -> None:
        idle = self._idle()
        excess = sum(group.tokens for group in idle) - self.kept_tokens
        for group in idle:
            if excess <= 0:
                return
            excess -= group.tokens
            self._drop(group)

    def _drop(self, group: Arena) -> None:
        del self._groups[group.key]
        self._nbytes -= group.nbytes
        self.counters["evicted_groups"] += 1

    def warm_up(self) -> None:
        """Compile every kernel, so that no step waits for it."""
        other = Drafter(max_draft_tokens=self.max_draft_tokens, scope=self.scope)
        other.start("warm-up", np.array([1, 2, 1], dtype=np.int32))
        tokens = np.arange(5000, dtype=np.int32) % 7
        other.step(["warm-up"], tokens, np.array([0, len(tokens)]), np.array([self.max_draft_tokens], dtype=np.int32))
