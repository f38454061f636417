"""Other drafters behind the interface of sam.drafter.Drafter, to be replayed beside it.

`ngram` and `suffix` are the installed packages' own code. `first-occurrence` is the policy of the published recipe
(cann-recipes-train, llm_rl/qwen3): an automaton for each request, drafting what followed the first occurrence of the
longest repeated suffix.
"""

from __future__ import annotations

import numpy as np

from sam.drafter import Drafter, Drafts

NAMES = ("sam", "first-occurrence", "ngram", "suffix")


def make_drafter(name: str, scope: str, draft_length: int):
    """A drafter by its name.

    Raises:
        ValueError: unknown name, or its package is not installed.
    """
    if name == "sam":
        drafter = Drafter(max_draft_tokens=draft_length, scope=scope)
        drafter.warm_up()
        return drafter
    if name == "first-occurrence":
        return FirstOccurrence()
    try:
        if name == "ngram":
            return Ngram()
        if name == "suffix":
            return Suffix(group=scope != "request")
    except ImportError as error:
        raise ValueError(f"drafter {name}: {error}; install requirements/cpu.txt and requirements/peers.txt") from error
    raise ValueError(f"drafter {name!r}: expected one of {', '.join(NAMES)}")


class _Peer:
    """Steps one request after the other."""

    nbytes = 0

    def step(self, request_ids, token_ids, offsets, budgets) -> Drafts:
        drafts = []
        for row, request_id in enumerate(request_ids):
            tokens = token_ids[offsets[row] : offsets[row + 1]]
            drafts.append(np.asarray(self.step_one(request_id, tokens, int(budgets[row])), dtype=np.int32))
        bounds = np.concatenate([[0], np.cumsum([len(draft) for draft in drafts])])
        flat = np.concatenate(drafts) if drafts else np.empty(0, np.int32)
        return Drafts(flat, bounds, np.ones(len(flat), np.float32), np.zeros(len(drafts), np.int32))


class FirstOccurrence(_Peer):
    def __init__(self):
        self._requests: dict[str, _Automaton] = {}

    def start(self, request_id: str, prompt: np.ndarray) -> None:
        automaton = self._requests[request_id] = _Automaton()
        for token in prompt.tolist():
            automaton.extend(token)

    def step_one(self, request_id: str, tokens: np.ndarray, budget: int) -> list[int]:
        automaton = self._requests[request_id]
        for token in tokens.tolist():
            automaton.extend(token)
        return automaton.draft(budget)

    def finish(self, request_id: str) -> None:
        del self._requests[request_id]


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


class Ngram(_Peer):
    """vLLM's prompt lookup with the lengths of configs/speculation/knobs.yaml."""

    SHORTEST, LONGEST, MAX_MODEL_LEN = 2, 5, 1 << 30

    def __init__(self):
        from vllm.v1.spec_decode.ngram_proposer import _find_longest_matched_ngram_and_propose_tokens

        self._propose = _find_longest_matched_ngram_and_propose_tokens
        self._texts: dict[str, tuple[np.ndarray, int]] = {}

    def start(self, request_id: str, prompt: np.ndarray) -> None:
        self._texts[request_id] = (np.array(prompt, dtype=np.int32), len(prompt))

    def step_one(self, request_id: str, tokens: np.ndarray, budget: int) -> np.ndarray:
        buffer, used = self._texts[request_id]
        if used + len(tokens) > len(buffer):
            buffer = np.concatenate([buffer[:used], np.empty(used + len(tokens) + 1024, np.int32)])
        buffer[used : used + len(tokens)] = tokens
        used += len(tokens)
        self._texts[request_id] = (buffer, used)
        return self._propose(buffer[:used], self.SHORTEST, self.LONGEST, self.MAX_MODEL_LEN, budget)

    def finish(self, request_id: str) -> None:
        del self._texts[request_id]


class Suffix(_Peer):
    """Arctic Inference's suffix decoding with vLLM's defaults; its group scope is its cache of responses."""

    DEPTH, FACTOR, SMALLEST_PROBABILITY = 24, 1.0, 0.1

    def __init__(self, group: bool):
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._cache = SuffixDecodingCache(max_tree_depth=self.DEPTH, max_cached_requests=10_000 if group else 0)
        self._texts: dict[str, list[int]] = {}

    def start(self, request_id: str, prompt: np.ndarray) -> None:
        self._cache.start_request(request_id, prompt)
        self._texts[request_id] = prompt.tolist()

    def step_one(self, request_id: str, tokens: np.ndarray, budget: int) -> list[int]:
        text = self._texts[request_id]
        if len(tokens):
            text.extend(tokens.tolist())
            self._cache.add_active_response(request_id, tokens.tolist())
        draft = self._cache.speculate(
            request_id,
            np.array(text[-self.DEPTH :], dtype=np.int32),
            max_spec_tokens=budget,
            max_spec_factor=self.FACTOR,
            min_token_prob=self.SMALLEST_PROBABILITY,
        )
        return draft.token_ids

    def finish(self, request_id: str) -> None:
        self._cache.stop_request(request_id)
        del self._texts[request_id]
