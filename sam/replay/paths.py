"""Recordings replayed with several paths of draft tokens for each text (sam.drafting.paths.forks).

Two questions are asked. At equal verified tokens: are k tokens better spent on several short paths than on one? At
equal depth: what do further paths of up to k tokens bring? Each is asked for 0, 1, 5 and 15 complete siblings known, as
in table 2 of Seer (arXiv 2511.14617v3), whose figures stand beside.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from sam.automaton.store import add_group, blocks_for, make_store, reserve
from sam.config import SpeculationConfig
from sam.drafting.batch import PROMPT_SLOT, append
from sam.drafting.context_mixing import draft
from sam.drafting.mixing_weights import Learned, make_learned
from sam.drafting.paths.forks import grow, make_tree
from sam.drafting.prompt_memory import BUDGET_SHARE, PromptMemory, make_memory, prompt_tag
from sam.drafting.sequences import make_sequences, start_sequence
from sam.jit import compiled, kernel
from sam.record.responses import Recording, read_recording

KNOWN_SIBLINGS = (0, 1, 5, 15)
# Mean acceptance length by paths and by known siblings: Seer, arXiv 2511.14617v3, table 2. Their models and texts.
SEER = {1: (1.70, 2.04, 2.32, 2.53), 2: (1.77, 2.14, 2.44, 2.69), 4: (1.85, 2.25, 2.59, 2.85)}
EQUAL_TOKENS, EQUAL_DEPTH = "tokens", "depth"


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

    @property
    def tree_tokens(self) -> np.ndarray:
        """int64 [n]: draft tokens if a tree is verified, each token once."""
        return (self.lengths - self.shared).sum(axis=1, dtype=np.int64)

    @property
    def row_tokens(self) -> np.ndarray:
        """int64 [n]: draft tokens if each further path is a row, which begins with the last sampled token again."""
        return (self.lengths + (self.lengths > 0)).sum(axis=1, dtype=np.int64) - (self.lengths[:, 0] > 0)


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


def known_siblings(recording: Recording) -> list[int]:
    """The levels of KNOWN_SIBLINGS for which at least half of the prompts have enough samples."""
    typical = int(np.median([len(samples) for samples in recording.responses]))
    return [known for known in KNOWN_SIBLINGS if known < typical]


def score(
    recording: Recording,
    known: int,
    fewest: int,
    limits: tuple[int, int, int],
    progress: Callable[[int], object],
    cross_prompt: bool = SpeculationConfig.cross_prompt,
) -> dict:
    """Replay every sample of the prompts that have `fewest` samples, with the `known` next ones complete beforehand.

    With `cross_prompt` the prompts before are remembered.

    Returns:
        mean_acceptance_length; tree_tokens and row_tokens of a step; and how often the first token of a further path
        was right, beside its probability beforehand: right and predicted.
    """
    learned, memory = make_learned(), product_memory(cross_prompt)
    advanced = tree_tokens = row_tokens = count = 0
    forks, right, predicted = 0, 0, 0.0
    for prompt, samples in zip(recording.prompts, recording.responses, strict=True):
        for i, text in enumerate(samples if len(samples) >= fewest else []):
            siblings = [samples[(i + 1 + j) % len(samples)] for j in range(known)]
            steps = play_group(learned, memory, prompt, siblings, [text], limits)
            count += len(steps.position)
            advanced += int(steps.advanced.sum())
            tree_tokens += int(steps.tree_tokens.sum())
            row_tokens += int(steps.row_tokens.sum())
            step, path = np.nonzero(steps.lengths[:, 1:])
            own = steps.shared[step, path + 1]
            forks += len(step)
            right += int((steps.accepted[step, path + 1] > own).sum())
            predicted += float(steps.acceptance[step, path + 1, own].sum())
            progress(len(text))
    return {
        "mean_acceptance_length": round(advanced / max(1, count), 4),
        "tree_tokens": round(tree_tokens / max(1, count), 2),
        "row_tokens": round(row_tokens / max(1, count), 2),
        "right": round(right / max(1, forks), 4),
        "predicted": round(predicted / max(1, forks), 4),
    }


def compare_paths(
    traces: list[Path], paths: list[int], k: int, cross_prompt: bool, tokenizer: str | None = None
) -> Iterator[dict]:
    """A row for each recording, number of known siblings, number of paths, and what is equal."""
    for trace in traces:
        recording = read_recording(trace, tokenizer)
        levels = known_siblings(recording)
        runs = [(n, p, equal) for n in levels for p in paths for equal in (EQUAL_TOKENS, EQUAL_DEPTH)]
        runs = [run for run in runs if run[1] > 1 or run[2] == EQUAL_TOKENS]  # one path: both are the same
        played = sum(sum(map(len, s)) for s in recording.responses if len(s) > levels[-1])
        with tqdm(total=played * len(runs), unit="tok", desc=f"{trace.stem} paths", mininterval=2.0) as bar:
            for known, count, equal in runs:
                limits = (count, k if equal == EQUAL_TOKENS else count * k, k)
                row = score(recording, known, levels[-1] + 1, limits, bar.update, cross_prompt)
                for name in (equal,) if count > 1 else (EQUAL_TOKENS, EQUAL_DEPTH):
                    yield {"file": trace.name, "known": known, "paths": count, "equal": name, "k": k, **row}


def paths_table(rows: list[dict]) -> str:
    """Lay out the rows as text, a line for each recording and number of paths, and Seer's figures below."""
    k, levels = rows[0]["k"], KNOWN_SIBLINGS
    found = {(row["file"], row["paths"], row["equal"], row["known"]): row for row in rows}
    heads = "".join(f"{known:>6}" for known in levels)
    lines = [
        f"mean acceptance length with k={k}, by complete siblings known; verified: draft tokens of a step, at equal",
        "depth and with most siblings, as a tree and as rows; right: the first own token of a further path",
        f"{'':26} {'paths':>5} |{'at equal tokens':>24} |{'at equal depth':>24} |{'verified':>12} | further path right",
        f"{'file':26} {'':>5} |{heads} |{heads} |{'':12} | (predicted)",
    ]
    for file, paths in dict.fromkeys((row["file"], row["paths"]) for row in rows):
        cells = []
        for equal in (EQUAL_TOKENS, EQUAL_DEPTH):
            line = [found.get((file, paths, equal, known)) for known in levels]
            cells.append("".join(f"{row['mean_acceptance_length']:6.2f}" if row else f"{'-':>6}" for row in line))
        most = [row for row in line if row][-1]
        verified = f"{most['tree_tokens']:.1f}, {most['row_tokens']:.1f}"
        forks = f"{most['right']:.3f} ({most['predicted']:.3f})" if paths > 1 else ""
        lines.append(f"{file[:26]:26} {paths:>5} |{cells[0]} |{cells[1]} |{verified:>12} | {forks}".rstrip())
    for paths in sorted({row["paths"] for row in rows} & set(SEER)):
        line = "".join(f"{length:6.2f}" for length in SEER[paths])
        lines.append(f"{'Seer, table 2':26} {paths:>5} |{'':24} |{line} |")
    return "\n".join(lines)
