"""Which text's keys and values lie in the blocks of a draft model's KV cache.

A draft model that rests misses tokens, and blocks change hands meanwhile: by preemption, by prefix caching, by the end
of a request. A block's note says how many of its tokens the draft model has written, and names the text up to there by
a rolling hash, with which the text of a request is compared.
"""

import numpy as np

from sam.jit import compiled

FACTOR = np.uint64(0x9E3779B97F4A7C15)  # of the rolling hash; odd, its bits are those of the golden ratio


@compiled
def extend_hashes(hashes, tokens, begin):
    """Write hashes[i + 1], of the first i + 1 tokens, for all i from `begin`; hashes: uint64 [more than tokens]."""
    for i in range(begin, tokens.size):
        mixed = (hashes[i] ^ np.uint64(tokens[i] + 1)) * FACTOR
        hashes[i + 1] = mixed ^ (mixed >> np.uint64(29))


class WrittenBlocks:
    """The notes of all blocks, and the hashes of the texts of running requests; a block has `block_size` tokens."""

    def __init__(self, block_size: int):
        self.block_size = block_size
        self._texts: dict[str, tuple[int, np.ndarray]] = {}  # tokens hashed, and the hashes
        self.clear()

    def clear(self) -> None:
        """Take all blocks for unwritten, as after their memory was given away."""
        # By block: how many of its tokens are written, and the hash of the text up to their end.
        self._counts = np.zeros(0, np.int64)
        self._hashes = np.zeros(0, np.uint64)

    def written(self, request_id: str, tokens: np.ndarray, blocks: np.ndarray, before: int = -1) -> int:
        """Tokens at the beginning of a request's text whose keys and values the draft model has.

        Args:
            tokens: int32 [length], the whole text, which only ever grows.
            blocks: int [n], the request's blocks in order, enough for the text.
            before: a token that stands before the text and is as much a part of what names it; -1: none.
        """
        known, hashes = self._texts.get(request_id, (0, np.full(1, before + 1, np.uint64)))
        if tokens.size >= hashes.size:
            hashes = np.concatenate([hashes, np.zeros(max(256, tokens.size), np.uint64)])
        extend_hashes(hashes, tokens, known)
        self._texts[request_id] = tokens.size, hashes
        blocks = blocks[: -(-tokens.size // self.block_size)]
        missing = int(blocks.max(initial=-1)) + 1 - self._counts.size
        if missing > 0:
            more = missing + self._counts.size
            self._counts = np.append(self._counts, np.zeros(more, np.int64))
            self._hashes = np.append(self._hashes, np.zeros(more, np.uint64))
        counts = self._counts[blocks]
        ends = np.arange(len(blocks)) * self.block_size + counts
        named = hashes[np.minimum(ends, tokens.size)]
        is_right = (counts > 0) & (ends <= tokens.size) & (self._hashes[blocks] == named)
        is_right[1:] &= counts[:-1] == self.block_size
        valid = len(blocks) if is_right.all() else int(is_right.argmin())
        return int(ends[valid - 1]) if valid else 0

    def note(self, request_id: str, begin: int, end: int, blocks: np.ndarray) -> None:
        """The draft model has written tokens `begin` to `end` of a text that `written` was asked about."""
        if end <= begin:
            return
        _, hashes = self._texts[request_id]
        for i in range(begin // self.block_size, -(-end // self.block_size)):
            last = min(end, (i + 1) * self.block_size)
            self._counts[blocks[i]] = last - i * self.block_size
            self._hashes[blocks[i]] = hashes[last]

    def keep_only(self, request_ids) -> None:
        """Forget the hashes of the texts of all other requests."""
        self._texts = {name: text for name, text in self._texts.items() if name in request_ids}
