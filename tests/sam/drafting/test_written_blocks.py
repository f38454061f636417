"""What a draft model's KV cache holds: told from the text alone, whatever became of the blocks."""

import numpy as np

from sam.drafting.written_blocks import WrittenBlocks

SIZE = 4


def test_it_agrees_with_a_cache_that_keeps_every_token():
    """Random texts, blocks handed out at random, partial writes: against the texts that the slots really hold."""
    random, notes, slots, found = np.random.default_rng(0), WrittenBlocks(SIZE), {}, 0
    stems = random.integers(0, 3, (3, 40)).astype(np.int32)
    for step in range(600):
        text = stems[step % 3][: random.integers(1, 40)].copy()
        if random.random() < 0.3:
            text[random.integers(len(text))] = 9
        blocks = random.permutation(12)[: -(-len(text) // SIZE)]
        places = [(int(blocks[i // SIZE]), i % SIZE) for i in range(len(text))]
        valid = notes.written(str(step), text, blocks)
        assert all(slots.get(places[i]) == text[: i + 1].tobytes() for i in range(valid))
        found += valid > 0
        end = int(random.integers(valid, len(text) + 1))
        notes.note(str(step), valid, end, blocks)
        slots |= {places[i]: text[: i + 1].tobytes() for i in range(valid, end)}
    assert found > 30
    notes.keep_only([])
    assert notes.written(str(step), text, blocks) >= end, "without its hashes a text is hashed again"
    notes.clear()
    assert notes.written(str(step), text, blocks) == 0, "without notes nothing is written"
