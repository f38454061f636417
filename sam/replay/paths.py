"""Recordings replayed with several paths of draft tokens for each text (sam.drafting.paths.forks), for sam.paths."""

from typing import NamedTuple

import numpy as np

from sam.automaton.store import add_group, blocks_for, make_store, reserve
from sam.config import SpeculationConfig
from sam.drafting.batch import PROMPT_SLOT, append
from sam.drafting.context_mixing import draft
from sam.drafting.mixing_weights import Learned
from sam.drafting.paths.forks import grow, make_tree
from sam.drafting.prompt_memory import BUDGET_SHARE, PromptMemory, make_memory, prompt_tag
from sam.drafting.sequences import make_sequences, start_sequence
from sam.jit import compiled, kernel


class Steps(NamedTuple):
    """Verify steps of a replay, with up to `paths` paths of up to `depth` tokens.

    Attributes:
        position: int32 [n], response tokens before the step.
        advanced: int32 [n], accepted tokens and the bonus token.
        lengths: int16 [n, paths], tokens of each path, those shared with an earlier path included; 0: no such path.
        shared: int16 [n, paths], tokens that a path shares with an earlier one.
        accepted: int16 [n, paths], tokens of each path that the text goes on with.
        acceptance: float32 [n, paths, depth], cumulative acceptance probabilities.
    """

    position: np.ndarray
    advanced: np.ndarray
    lengths: np.ndarray
    shared: np.ndarray
    accepted: np.ndarray
    acceptance: np.ndarray

    def first(self, count: int) -> "Steps":
        """The first `count` steps, copied."""
        return Steps(*(array[:count].copy() for array in self))


def make_steps(count: int, paths: int, depth: int) -> Steps:
    """Room for `count` steps."""
    numbers, shape = (np.zeros(count, np.int32) for _ in range(2)), (count, paths)
    return Steps(*numbers, *(np.zeros(shape, np.int16) for _ in range(3)), np.zeros((*shape, depth), np.float32))


@kernel
def _record(tree, steps, row, text, position, end):
    """Compare the tree with text[position:end] and note the step; returns the tokens to advance by."""
    steps.position[row] = position
    steps.lengths[row], steps.shared[row], steps.accepted[row] = 0, 0, 0
    accepted = 0
    # A node's parent comes before it: `depth` of a node that the text goes on with is what is accepted there.
    for i in range(1, tree.sizes[0]):
        node = tree.nodes[i]
        path, parent = node.path, node.parent
        if steps.lengths[row, path] == 0 and node.depth > 1:
            # A new path begins with a part of an earlier one.
            steps.shared[row, path] = node.depth - 1
            while parent > 0:
                above = tree.nodes[parent]
                steps.acceptance[row, path, above.depth - 1] = above.acceptance
                parent = above.parent
            steps.accepted[row, path] = min(node.depth - 1, steps.accepted[row, tree.nodes[node.parent].path])
        steps.lengths[row, path] = node.depth
        steps.acceptance[row, path, node.depth - 1] = node.acceptance
        at = position + node.depth - 1
        if steps.accepted[row, path] == node.depth - 1 and at < end and text[at] == node.token:
            steps.accepted[row, path] = node.depth
            accepted = max(accepted, node.depth)
    advanced = min(accepted + 1, end - position)
    steps.advanced[row] = advanced
    return advanced


@compiled
def play(store, memory, learned, sequences, tree, tokens, offsets, limits, at_once, steps):
    """Play texts to their end; text i is tokens[offsets[i]:offsets[i + 1]], in slot i + 1 of `sequences`.

    Args:
        limits: paths, draft tokens of a step, and tokens of a path.
        at_once: whether all texts draft before any advances, as in an engine.
        steps: Steps with room for a step for each token.

    Returns:
        The number of steps.
    """
    paths, most_tokens, depth = limits
    texts = offsets.size - 1
    begins, advanced = offsets[:-1].copy(), np.zeros(texts, np.int64)
    row, live = 0, texts
    while live:
        live = 0
        for i in range(texts):
            slot, end = i + 1, offsets[i + 1]
            advanced[i] = 0
            if begins[i] < end:
                draft(store, memory, learned, sequences, slot, depth, 0.0)  # calibration learns from the product's
                grow(store, memory, learned, sequences, slot, tree, paths, most_tokens, depth)
                advanced[i] = _record(tree, steps, row, tokens, begins[i], end)
                steps.position[row] -= offsets[i]
                row += 1
                if not at_once:
                    append(store, memory, learned, sequences, slot, tokens, begins[i], begins[i] + advanced[i])
        for i in range(texts):
            if at_once and advanced[i]:
                append(store, memory, learned, sequences, i + 1, tokens, begins[i], begins[i] + advanced[i])
            begins[i] += advanced[i]
            live += begins[i] < offsets[i + 1]
    return row


def product_memory(cross_prompt: bool = SpeculationConfig.cross_prompt) -> PromptMemory:
    """An empty memory of other prompts, as large as the product's; without `cross_prompt`, none."""
    return make_memory((SpeculationConfig.memory_budget_mib << 20) // BUDGET_SHARE if cross_prompt else 0)


def play_group(
    learned: Learned,
    memory: PromptMemory,
    prompt: np.ndarray,
    known: list[np.ndarray],
    texts: list[np.ndarray],
    limits: tuple[int, int, int],
    at_once: bool = False,
) -> Steps:
    """Play samples of a prompt in an automaton that has read `known`, complete siblings.

    Args:
        learned, memory: what drafting learns and remembers, from group to group.
        limits: paths, draft tokens of a step, and tokens of a path.
        at_once: as `play`.
    """
    paths, most_tokens, depth = limits
    texts = [text for text in texts if len(text)]
    offsets = np.concatenate([[0], np.cumsum([len(text) for text in texts])]).astype(np.int64)
    total = len(prompt) + int(offsets[-1]) + sum(map(len, known))
    store, slots = make_store(blocks_for(total)), range(1, len(texts) + 1)
    sequences, prompt = make_sequences(len(texts) + 2, depth), np.ascontiguousarray(prompt, np.int32)
    tag, sibling_slot = prompt_tag(prompt), len(texts) + 1
    start_sequence(sequences, PROMPT_SLOT, 0, add_group(store, 0), prompt[:0], tag)
    reserve(store, 0, total)
    append(store, memory, learned, sequences, PROMPT_SLOT, prompt, 0, len(prompt))
    end = int(sequences.texts[PROMPT_SLOT]["end"])
    for sibling in known:
        start_sequence(sequences, sibling_slot, 0, end, prompt, tag)
        append(store, memory, learned, sequences, sibling_slot, sibling, 0, len(sibling))
    for slot in slots:
        start_sequence(sequences, slot, 0, end, prompt, tag)
    steps, tree = make_steps(int(offsets[-1]), paths, depth), make_tree(paths, min(most_tokens, paths * depth))
    tokens = np.concatenate([np.empty(0, np.int32), *texts])
    return steps.first(play(store, memory, learned, sequences, tree, tokens, offsets, limits, at_once, steps))
