"""Baselines: other drafters with the interface of sam.drafting.drafter.Drafter, to be replayed beside it.

`ngram` and `suffix` are the installed packages' own code (sam.vllm.baselines); `suffix-any` is `suffix` without its
limits on a draft's length and probability, which accepts most. `first-occurrence` is the drafter of the published
recipe (cann-recipes-train, llm_rl/qwen3): an automaton for each request, which drafts the tokens that followed the
first occurrence of the longest repeated suffix.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sam.drafting.drafter import Drafter, Drafts

HISTORY_TOKENS = 4 << 20  # with scope=history, enough for any recording here
NAMES = ("sam", "first-occurrence", "ngram", "suffix", "suffix-any")


def make_drafter(name: str, scope: str, draft_length: int, corpus: Path | None = None):
    """Build a drafter by its name, one of NAMES.

    Args:
        scope: request, group or history: whose tokens it drafts from.
        draft_length: draft tokens of a request at most.
        corpus: file of sam.corpus, used by sam alone.

    Raises:
        ValueError: unknown name, or its package is not installed.
    """
    if name == "sam":
        drafter = Drafter(max_draft_tokens=draft_length, scope=scope, history_tokens=HISTORY_TOKENS, corpus=corpus)
        drafter.warm_up()
        return drafter
    if name == "first-occurrence":
        return StepwiseDrafter(FirstOccurrence())
    try:
        if name == "ngram":
            from sam.vllm.baselines import Ngram

            return StepwiseDrafter(Ngram())
        if name in ("suffix", "suffix-any"):
            from sam.vllm.baselines import Suffix

            limits = {} if name == "suffix" else {"max_spec_factor": 100.0, "min_token_prob": 0.0}
            return StepwiseDrafter(Suffix(group=scope != "request", **limits))
    except ImportError as error:
        raise ValueError(f"drafter {name}: {error}; install requirements/cpu.txt and requirements/peers.txt") from error
    raise ValueError(f"drafter {name!r}: expected one of {', '.join(NAMES)}")


class StepwiseDrafter:
    """Gives a drafter that takes one request at a time the interface of sam.drafting.drafter.Drafter.

    Args:
        method: has `start(request_id, prompt)`, `add(request_id, tokens)`, `propose(request_id, budget)` and
            `finish(request_id)`.
    """

    nbytes = 0

    def __init__(self, method):
        self.method = method
        self.start, self.finish = method.start, method.finish

    def append(self, request_ids, token_ids, offsets) -> None:
        """Show the drafter the requests' new tokens."""
        for row, request_id in enumerate(request_ids):
            self.method.add(request_id, token_ids[offsets[row] : offsets[row + 1]])

    def draft(self, request_ids, budgets) -> Drafts:
        """Draft up to budgets[i] tokens for request i."""
        found = [
            self.method.propose(request_id, budget)
            for request_id, budget in zip(request_ids, budgets.tolist(), strict=True)
        ]
        drafts = [np.asarray(draft, dtype=np.int32) for draft in found]
        bounds = np.concatenate([[0], np.cumsum([len(draft) for draft in drafts])])
        flat = np.concatenate(drafts) if drafts else np.empty(0, np.int32)
        return Drafts(flat, bounds, np.ones(len(flat), np.float32), np.zeros(len(drafts), np.int32))


class FirstOccurrence:
    """The published recipe's drafter: an automaton for each request."""

    def __init__(self):
        self._requests: dict[str, _Automaton] = {}
        self.finish = self._requests.pop

    def start(self, request_id: str, prompt: np.ndarray) -> None:
        """Start to follow a request."""
        self._requests[request_id] = _Automaton()
        self.add(request_id, prompt)

    def add(self, request_id: str, tokens: np.ndarray) -> None:
        """Append the request's new tokens."""
        for token in tokens.tolist():
            self._requests[request_id].extend(token)

    def propose(self, request_id: str, budget: int) -> list[int]:
        """Draft up to `budget` tokens."""
        return self._requests[request_id].draft(budget)


class _Automaton:
    """Textbook suffix automaton that remembers where each state's strings first end."""

    def __init__(self):
        self.text: list[int] = []
        self.next: list[dict[int, int]] = [{}]
        self.link, self.length, self.first_end, self.last = [-1], [0], [-1], 0

    def _add(self, length: int, edges: dict[int, int], link: int, first_end: int) -> int:
        self.next.append(edges)
        self.link.append(link)
        self.length.append(length)
        self.first_end.append(first_end)
        return len(self.next) - 1

    def extend(self, token: int) -> None:
        new = self._add(self.length[self.last] + 1, {}, 0, len(self.text))
        self.text.append(token)
        state = self.last
        while state != -1 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        if state != -1:
            target = self.next[state][token]
            if self.length[target] != self.length[state] + 1:
                clone = self._add(
                    self.length[state] + 1, dict(self.next[target]), self.link[target], self.first_end[target]
                )
                self.link[target] = clone
                while state != -1 and self.next[state].get(token) == target:
                    self.next[state][token] = clone
                    state = self.link[state]
                target = clone
            self.link[new] = target
        self.last = new

    def draft(self, budget: int) -> list[int]:
        state = self.link[self.last]
        if state <= 0:
            return []
        start = self.first_end[state] + 1
        return self.text[start : start + budget]
