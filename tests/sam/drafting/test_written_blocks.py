"""What a draft model's KV cache holds: told from the text alone, whatever became of the blocks."""

import numpy as np

from sam.drafting.written_blocks import WrittenBlocks

SIZE = 4


def test_it_agrees_with_a_cache_that_keeps_every_token():
    """Random texts, blocks handed out at random, partial writes: against the texts that the slots really hold."""
    random = np.random.default_rng(0)
    notes, slots = WrittenBlocks(SIZE), {}
    stems = [random.integers(0, 3, 40).astype(np.int32) for _ in range(3)]
    found = 0
    for step in range(600):
        length = int(random.integers(1, 40))
        tokens = stems[step % 3][:length].copy()
        if random.random() < 0.3:
            tokens[random.integers(length)] = 9
        blocks = random.permutation(12)[: -(-length // SIZE)]
        valid = notes.written(str(step), tokens, blocks)
        held = [slots.get((int(blocks[i // SIZE]), i % SIZE)) == tokens[: i + 1].tobytes() for i in range(length)]
        assert all(held[:valid])
        found += valid > 0
        end = int(random.integers(valid, length + 1))
        notes.note(str(step), valid, end, blocks)
        for i in range(valid, end):
            slots[int(blocks[i // SIZE]), i % SIZE] = tokens[: i + 1].tobytes()
        if random.random() < 0.5:  # what was written is known at once, and what lay behind it may be right, too
            held = [slots.get((int(blocks[i // SIZE]), i % SIZE)) == tokens[: i + 1].tobytes() for i in range(length)]
            assert end <= (again := notes.written(str(step), tokens, blocks)) and all(held[:again])
    assert found > 30
    notes.keep_only([])
    assert notes.written(str(step), tokens, blocks) >= end, "without its hashes a text is hashed again"
    notes.clear()
    assert notes.written(str(step), tokens, blocks) == 0, "without notes nothing is written"
