"""Which text's keys and values lie in the blocks of a draft model's KV cache.

A draft model that rests misses tokens, and blocks change hands meanwhile: by preemption, by prefix caching, by the end
of a request. A block's note says how many of its tokens the draft model has written, and names the text up to there by
a rolling hash. The text of a request is compared with the notes when the draft model comes back; nothing has to be told
which block went where.
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


@compiled
def _written(block_hashes, block_counts, block_size, hashes, num_tokens, blocks):
    valid = 0
    for i in range(blocks.size):
        count = block_counts[blocks[i]]
        end = i * block_size + count
        if count == 0 or end > num_tokens or block_hashes[blocks[i]] != hashes[end]:
            break
        valid = end
        if count < block_size:
            break
    return valid


@compiled
def _note(block_hashes, block_counts, block_size, hashes, begin, end, blocks):
    for i in range(begin // block_size, (end - 1) // block_size + 1):
        last = min(end, (i + 1) * block_size)
        block_hashes[blocks[i]], block_counts[blocks[i]] = hashes[last], last - i * block_size


class WrittenBlocks:
    """The notes of all blocks, and the hashes of the texts of running requests.

    Args:
        block_size: tokens of a block.
    """

    def __init__(self, block_size: int):
        self.block_size = block_size
        self._texts: dict[str, tuple[int, np.ndarray]] = {}  # tokens hashed, and the hashes
        self.clear()

    def clear(self) -> None:
        """Take all blocks for unwritten, as after their memory was given away."""
        self._block_hashes, self._block_counts = np.zeros(0, np.uint64), np.zeros(0, np.int64)

    def written(self, request_id: str, tokens: np.ndarray, blocks: np.ndarray, before: int = -1) -> int:
        """Tokens at the beginning of a request's text whose keys and values the draft model has.

        Args:
            request_id: whose text only ever grows.
            tokens: int32 [length], the whole text.
            blocks: int [n], the request's blocks in order, enough for the text.
            before: a token that stands before the text and is as much a part of what names it; -1: none.
        """
        known, hashes = self._texts.get(request_id, (0, np.full(1, before + 1, np.uint64)))
        if tokens.size >= hashes.size:
            hashes = np.concatenate([hashes, np.zeros(max(256, tokens.size), np.uint64)])
        extend_hashes(hashes, tokens, known)
        self._texts[request_id] = tokens.size, hashes
        blocks = blocks[: -(-tokens.size // self.block_size)]
        if (most := int(blocks.max(initial=0))) >= self._block_counts.size:
            grown = 2 * most + 1
            self._block_hashes = np.concatenate([self._block_hashes, np.zeros(grown, np.uint64)])
            self._block_counts = np.concatenate([self._block_counts, np.zeros(grown, np.int64)])
        return _written(self._block_hashes, self._block_counts, self.block_size, hashes, tokens.size, blocks)

    def note(self, request_id: str, begin: int, end: int, blocks: np.ndarray) -> None:
        """The draft model has written tokens `begin` to `end` of a text that `written` was asked about."""
        if end > begin:
            hashes = self._texts[request_id][1]
            _note(self._block_hashes, self._block_counts, self.block_size, hashes, begin, end, blocks)

    def keep_only(self, request_ids) -> None:
        """Forget the hashes of the texts of all other requests."""
        for request_id in [name for name in self._texts if name not in request_ids]:
            del self._texts[request_id]
