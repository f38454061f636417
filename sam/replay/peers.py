"""Published drafters that need tokens alone, to be replayed beside the others; from their papers, not their code.

`pld` is prompt lookup decoding (Saxena, github.com/apoorvumang/prompt-lookup-decoding, 2023): the last 3, then 2, then
1 tokens are looked up in the request's own text, and what followed their first occurrence is drafted. vLLM's ngram is
the same idea with other limits: by default here it looks up 5 to 2 tokens, never 1, and drafts what there is, where
prompt lookup wants its draft whole.

`rest` is retrieval-based speculative decoding (REST, He et al., arXiv 2311.08252): the longest suffix of 16 to 2 tokens
is looked up in a datastore by a suffix array, and the most frequent continuation of at most 5,000 matches is drafted.
Its authors verify a tree of 64 such tokens; here one path is, as for every other drafter.

Token Recycling (Luo et al., arXiv 2408.08696) and lookahead decoding (Fu et al., arXiv 2402.02057) draft from the
target model's logits, which recordings do not have.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sam.jit import compiled
from sam.record.responses import read_recordings
from sam.replay.stepwise import StepwiseDrafter

PEERS = ("pld", "rest")
LONGEST_NGRAM = 3  # as prompt lookup's authors
LONGEST_SUFFIX, SHORTEST_SUFFIX = 16, 2  # as REST's authors
MAX_MATCHES = 5000
END_OF_TEXT = -1  # between the texts of a datastore


def make_peer(name: str, datastore: Sequence[Path]) -> StepwiseDrafter:
    """Build a drafter by its name, one of PEERS.

    Args:
        datastore: recordings of token ids that rest looks up; their prompts are left out.

    Raises:
        ValueError: rest without a datastore, or recordings that cannot be read.
    """
    if name == "pld":
        return PromptLookup()
    if not datastore:
        raise ValueError("drafter rest: its datastore is missing: name recordings with --datastore")
    recordings = [read_recordings(path) for path in datastore]
    return Rest([text for recording in recordings for samples in recording.responses for text in samples])


class PromptLookup(StepwiseDrafter):
    """Prompt lookup decoding: what followed the first occurrence of the last 3, 2 or 1 tokens."""

    def propose(self, request_id, text, budget):
        start = look_up(text, budget, LONGEST_NGRAM)
        return text[start : start + budget]


@compiled
def look_up(text, budget, longest):
    """Where the continuation begins, or the text's length; both as in the authors' find_candidate_pred_tokens."""
    for size in range(min(longest, text.size), 0, -1):
        for start in range(size, min(text.size - budget + 1, text.size - size)):
            same = True
            for i in range(size):
                if text[start - size + i] != text[text.size - size + i]:
                    same = False
                    break
            if same:
                return start
    return text.size


class Rest(StepwiseDrafter):
    """REST with one path: the most frequent continuation of the longest suffix that the datastore has."""

    def __init__(self, texts: list[np.ndarray]):
        super().__init__()
        end = np.array([END_OF_TEXT], np.int32)
        self._data = np.concatenate([end, *(part for text in texts for part in (text.astype(np.int32), end))])
        self._suffixes = suffix_array(self._data)
        self.nbytes = self._data.nbytes + self._suffixes.nbytes

    def propose(self, request_id, text, budget):
        return retrieve(self._data, self._suffixes, text, budget)


def suffix_array(data: np.ndarray) -> np.ndarray:
    """int64 [n]: where the suffixes of `data` (int32 [n]) begin, in their order.

    By prefix doubling (Manber and Myers, 1993), up to the tokens that `retrieve` compares.
    """
    ranks, compared = np.unique(data, return_inverse=True)[1].astype(np.int64), 1
    order = np.argsort(ranks, kind="stable")
    while compared < 2 * LONGEST_SUFFIX:
        following = np.full(len(data), -1, np.int64)
        following[: max(0, len(data) - compared)] = ranks[compared:]
        order = np.lexsort((following, ranks))
        new = (np.diff(ranks[order]) != 0) | (np.diff(following[order]) != 0)
        ranks = np.empty_like(ranks)
        ranks[order] = np.concatenate([[0], np.cumsum(new)])
        compared *= 2
    return order


@compiled
def _compare(data, begin, query, size):
    """-1, 0 or 1: whether the first `size` tokens from `begin` on sort before, as, or behind those of `query`."""
    for i in range(size):
        if begin + i >= data.size or data[begin + i] < query[i]:
            return -1
        if data[begin + i] > query[i]:
            return 1
    return 0


@compiled
def _first(data, suffixes, low, high, query, size, behind):
    """The first of suffixes[low:high] not before the query, or behind it."""
    while low < high:
        middle = (low + high) // 2
        order = _compare(data, suffixes[middle], query, size)
        if order < 0 or (behind and order == 0):
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def retrieve(data, suffixes, text, budget):
    """int32 [length]: the most frequent continuation, token by token, of the longest suffix that is found."""
    drafted = np.empty(budget, np.int32)
    for size in range(min(LONGEST_SUFFIX, text.size), SHORTEST_SUFFIX - 1, -1):
        query = text[text.size - size :]
        low = _first(data, suffixes, 0, suffixes.size, query, size, False)
        if low == suffixes.size or _compare(data, suffixes[low], query, size) != 0:
            continue
        high = min(_first(data, suffixes, low, suffixes.size, query, size, True), low + MAX_MATCHES)
        count = 0
        # Suffixes are in order: those that go on with the same tokens stand together.
        while count < budget and size + count < 2 * LONGEST_SUFFIX:
            begin, best, best_size, token = low, low, 0, END_OF_TEXT
            while begin < high:
                at = suffixes[begin] + size + count
                here = data[at] if at < data.size else END_OF_TEXT
                end = begin + 1
                while end < high:
                    at = suffixes[end] + size + count
                    if (data[at] if at < data.size else END_OF_TEXT) != here:
                        break
                    end += 1
                if here != END_OF_TEXT and end - begin > best_size:
                    best, best_size, token = begin, end - begin, here
                begin = end
            if best_size == 0:
                break
            drafted[count] = token
            count += 1
            low, high = best, best + best_size
        return drafted[:count]
    return drafted[:0]
