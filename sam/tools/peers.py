"""Other projects' drafters behind the interface of sam.drafting.drafter.Drafter, for `sam replay`.

Where a peer has a function that can be called, it is called. All but Suffix draft from a request's own text, or from a
corpus alone, whatever the scope.
"""

from collections.abc import Iterable

import numpy as np

from sam.config import LOOKUP
from sam.drafting.texts import Drafts
from sam.jit import compiled
from sam.record.corpus import Text

NAMES = ("suffix", "pld-transformers", "pld-vllm", "pld-newest", "rest")
# Tokens of a match of REST, as its paper has them.
SHORTEST = 2
LONGEST = 16
MOST_MATCHES = 5000  # of a context that REST counts


def drafts_of(parts: list[np.ndarray]) -> Drafts:
    """Drafts of a batch, one request after the other; none of them says how likely it is."""
    flat = np.concatenate([np.empty(0, np.int32), *parts])
    return Drafts(flat, np.cumsum([0, *map(len, parts)]), np.ones(len(flat), np.float32))


class Suffix:
    """Arctic Inference's suffix decoding with vLLM's defaults; its group scope is its cache of responses."""

    DEPTH = 24
    LIMITS = {"max_spec_factor": 1.0, "min_token_prob": 0.1}
    nbytes = 0

    def __init__(self, in_group: bool):
        from arctic_inference.suffix_decoding import SuffixDecodingCache

        self._cache = SuffixDecodingCache(max_tree_depth=self.DEPTH, max_cached_requests=10_000 if in_group else 0)
        self._ends: dict[str, np.ndarray] = {}  # of each request's text, DEPTH tokens

    def start(self, request_id, prompt):
        self._ends[request_id] = np.array(prompt[-self.DEPTH :], np.int32)
        self._cache.start_request(request_id, prompt)

    def append(self, request_ids, token_ids, offsets):
        for row, request_id in enumerate(request_ids):
            new = token_ids[offsets[row] : offsets[row + 1]]
            if len(new):
                self._ends[request_id] = np.append(self._ends[request_id], new.astype(np.int32))[-self.DEPTH :]
                self._cache.add_active_response(request_id, new.tolist())

    def draft(self, request_ids, budgets):
        drafts = []
        for name, budget in zip(request_ids, budgets.tolist(), strict=True):
            draft = self._cache.speculate(name, self._ends[name], max_spec_tokens=budget, **self.LIMITS)
            drafts.append(np.array(draft.token_ids, np.int32))
        return drafts_of(drafts)

    def finish(self, request_id):
        del self._ends[request_id]
        self._cache.stop_request(request_id)

    def read_corpus(self, texts: Iterable[Text]) -> None:
        """Keep the responses of a corpus in the cache, as those of finished requests."""
        for number, (prompt, response) in enumerate(texts):
            name = f"corpus {number}"
            self.start(name, prompt)
            self.append([name], response, [0, len(response)])
            self.finish(name)


class OwnText:
    """Holds each request's text, prompt and response, in a row of one table, as vLLM's model runner does.

    Subclasses draft from a row's text alone.
    """

    dtype = np.int32
    nbytes = 0

    def __init__(self):
        self.table = np.zeros((64, 1024), self.dtype)
        self.lengths = np.zeros(64, np.int32)
        self._rows: dict[str, int] = {}
        self._free = list(range(64))

    def start(self, request_id, prompt):
        if not self._free:
            rows = len(self.table)
            self.table = np.pad(self.table, ((0, rows), (0, 0)))
            self.lengths = np.pad(self.lengths, (0, rows))
            self._free = list(range(rows, 2 * rows))
        row = self._free.pop(0)
        self._rows[request_id] = row
        self.lengths[row] = 0
        self.append([request_id], prompt, [0, len(prompt)])

    def append(self, request_ids, token_ids, offsets):
        for place, request_id in enumerate(request_ids):
            new = token_ids[offsets[place] : offsets[place + 1]]
            row = self._rows[request_id]
            end = int(self.lengths[row]) + len(new)
            if end > self.table.shape[1]:
                self.table = np.pad(self.table, ((0, 0), (0, end)))
            self.table[row, self.lengths[row] : end] = new
            self.lengths[row] = end

    def draft(self, request_ids, budgets):
        pairs = zip(request_ids, budgets.tolist(), strict=True)
        return drafts_of([self.draft_from(self.text(name), budget) for name, budget in pairs])

    def text(self, request_id: str) -> np.ndarray:
        row = self._rows[request_id]
        return self.table[row, : self.lengths[row]]

    def draft_from(self, text: np.ndarray, budget: int) -> np.ndarray:
        raise NotImplementedError

    def finish(self, request_id):
        self._free.insert(0, self._rows.pop(request_id))


class TransformersLookup(OwnText):
    """Prompt lookup by transformers' own function with its default: what follows the oldest match of 2 tokens, or 1."""

    dtype = np.int64

    def __init__(self, draft_tokens: int):
        import torch
        from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

        super().__init__()
        never = torch.tensor([-1])
        largest = 1 << 30
        self._generator = PromptLookupCandidateGenerator(never, draft_tokens, max_length=largest)
        self._tensor = torch.from_numpy

    def draft_from(self, text, budget):
        candidates, _logits = self._generator.get_candidates(self._tensor(text)[None])
        return candidates[0, len(text) : len(text) + budget].numpy().astype(np.int32)


class VllmLookup(OwnText):
    """vLLM's own prompt lookup, called with all rows at once: what follows the oldest of the longest matches."""

    def __init__(self, draft_tokens: int):
        from sam.vllm.bench.prompt_lookup import make_ngram_proposer

        super().__init__()
        self._proposer = make_ngram_proposer(draft_tokens, *LOOKUP)

    def draft(self, request_ids, budgets):
        rows = [self._rows[name] for name in request_ids]
        part = slice(min(rows), max(rows) + 1)
        drafting = set(rows)
        sampled = [[0] if row in drafting else [] for row in range(part.start, part.stop)]
        self._proposer.max_model_len = self.table.shape[1] + 1024
        drafts = self._proposer.propose(sampled, self.lengths[part], self.table[part])
        pairs = zip(rows, budgets.tolist(), strict=True)
        return drafts_of([np.array(drafts[row - part.start][:budget], np.int32) for row, budget in pairs])


class NewestLookup(OwnText):
    """As vLLM's prompt lookup, but what follows the newest of the longest matches."""

    def draft_from(self, text, budget):
        return newest_match(text, *LOOKUP, budget)


@compiled
def newest_match(text, shortest, longest, budget):
    """What follows the newest of the longest matches of the text's end in what stands before, up to `budget` tokens."""
    best = shortest - 1
    place = 0
    for end in range(text.size - 1, 0, -1):
        length = 0
        while length < min(longest, end) and text[end - 1 - length] == text[text.size - 1 - length]:
            length += 1
        if length > best:
            best = length
            place = end
            if length == longest:
                break
    return text[place : place + budget * (place > 0)]


class Rest(OwnText):
    """REST (He et al., 2023): what most often follows the longest match of a text's end in a corpus, of which it has a
    suffix array, and one path of its tree."""

    def __init__(self):
        super().__init__()
        self.read_corpus([])

    def read_corpus(self, texts: Iterable[Text]) -> None:
        """Build the suffix array of all responses, each behind its prompt; -1 stands between them."""
        pieces = [piece for text in texts for piece in (*text, [-1])]
        self._corpus = np.concatenate([np.empty(0, np.int32), *pieces]).astype(np.int32)
        self._order = suffix_order(self._corpus)
        self.nbytes = self._corpus.nbytes + self._order.nbytes

    def draft_from(self, text, budget):
        return most_frequent(self._corpus, self._order, text, budget)


def suffix_order(tokens: np.ndarray) -> np.ndarray:
    """int64 [length]: where suffixes begin, in the order of their first LONGEST tokens, by doubling prefixes."""
    ranks = np.unique(tokens, return_inverse=True)[1].astype(np.int64) + 1
    sorted_by = 1
    while sorted_by < LONGEST:
        following = np.concatenate([ranks[sorted_by:], np.zeros(min(sorted_by, len(ranks)), np.int64)])
        ranks = np.unique(ranks * (len(tokens) + 2) + following, return_inverse=True)[1].astype(np.int64) + 1
        sorted_by *= 2
    return np.argsort(ranks, kind="stable")


@compiled
def first_not_below(corpus, order, pattern, is_above):
    """Index in `order` of the first suffix that is not below the pattern; `is_above`: that is above it."""
    low = 0
    high = order.size
    while low < high:
        middle = (low + high) // 2
        difference = 0
        begin = order[middle]
        for i in range(pattern.size):
            token = corpus[begin + i] if begin + i < corpus.size else -2
            if token != pattern[i]:
                difference = -1 if token < pattern[i] else 1
                break
        if difference < 0 or (is_above and difference == 0):
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def most_frequent(corpus, order, text, budget):
    """The path of `budget` tokens at most that most often follows the longest match of the text's end."""
    draft = np.empty(budget, np.int32)
    for length in range(min(LONGEST, text.size), SHORTEST - 1, -1):
        pattern = text[text.size - length :]
        first = first_not_below(corpus, order, pattern, False)
        last = min(first_not_below(corpus, order, pattern, True), first + MOST_MATCHES)
        if first == last:
            continue
        places = order[first:last] + length
        size = 0
        while size < budget and places.size:
            followers = np.sort(np.array([corpus[place] if place < corpus.size else -1 for place in places]))
            token = -1
            most = 0
            count = 0
            for i in range(followers.size):
                count = count + 1 if i and followers[i] == followers[i - 1] else 1
                if followers[i] >= 0 and count > most:
                    token = followers[i]
                    most = count
            if token < 0:
                break
            draft[size] = token
            size += 1
            places = np.array([place + 1 for place in places if place < corpus.size and corpus[place] == token])
        if size:
            return draft[:size]
    return draft[:0]


def make_peer(name: str, scope: str, draft_tokens: int):
    """A peer by its name, one of NAMES; ImportError: its package is not installed."""
    if name == "suffix":
        return Suffix(scope != "request")
    if name == "pld-transformers":
        return TransformersLookup(draft_tokens)
    if name == "pld-vllm":
        return VllmLookup(draft_tokens)
    return NewestLookup() if name == "pld-newest" else Rest()
