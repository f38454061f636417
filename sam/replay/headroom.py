"""`python -m sam.headroom --traces FILES`: what choosing the context better could bring, and why it cannot.

An oracle that always drafts from the suffix whose continuation turns out right accepts more than any drafter that has
to choose beforehand. This counts, token by token, how often the text's contexts disagree, how often the choice is right
then, and how often the runner-up would have been, beside the probabilities given to both beforehand. Where these agree
with what was observed, and the choice is the likelier one, the rest of the distance is luck that one path cannot have.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

from sam.automaton import store
from sam.automaton.store import BEST, LENGTH, LINK, NONE, TOKEN, TOTAL
from sam.drafting import context_mixing
from sam.drafting.batch import append
from sam.drafting.context_mixing import BESIDE, BESIDE_AGE, BESIDE_LENGTH, END
from sam.jit import compiled
from sam.record.responses import TraceError, read_recording

# What is counted: tokens, those with a single candidate, of these the right ones; tokens whose contexts disagree, and
# of these: choice right, choice's probability, runner-up right, runner-up's probability, any other context's right.
TOKENS, SINGLE, SINGLE_RIGHT, SEVERAL, RIGHT, PREDICTED, SECOND_RIGHT, SECOND_PREDICTED, OTHER_RIGHT = range(9)


@compiled
def count_choice(records, heads, sizes, weights, room, sequences, row, token, counts):
    """Count one token before it is appended."""
    state, length = sequences[row, END], np.int64(records[sequences[row, END], LENGTH])
    beside, beside_length, age = sequences[row, BESIDE], sequences[row, BESIDE_LENGTH], sequences[row, BESIDE_AGE]
    contexts, _, _ = context_mixing._contexts(records, room, state, length, beside, beside_length, age)
    chosen, probability = context_mixing._predict(records, heads, sizes, weights, room, contexts)
    second, second_probability = np.int64(NONE), 0.0
    for i in range(contexts):
        candidate = room[context_mixing.TOKENS, i]
        p = context_mixing._probability(records, heads, sizes, weights, room, contexts, candidate)
        if candidate != chosen and p > second_probability:
            second, second_probability = candidate, p
    counts[TOKENS] += 1
    right_elsewhere = second != NONE and second == token
    while state != NONE and records[state, LENGTH] > 0:
        if records[state, TOTAL] != 0 and records[records[state, BEST], TOKEN] == token:
            right_elsewhere = True
        state = np.int64(records[state, LINK])
    if second == NONE:
        counts[SINGLE] += 1
        counts[SINGLE_RIGHT] += chosen == token
        return
    counts[SEVERAL] += 1
    counts[RIGHT] += chosen == token
    counts[PREDICTED] += probability
    counts[SECOND_RIGHT] += second == token
    counts[SECOND_PREDICTED] += second_probability
    counts[OTHER_RIGHT] += right_elsewhere and chosen != token


@compiled
def play(records, heads, groups, sizes, weights, room, sequences, tokens, offsets, counts):
    """All samples of a prompt, a token each in turn; sample i is tokens[offsets[i]:offsets[i + 1]], sequence i."""
    longest = np.max(offsets[1:] - offsets[:-1])
    for position in range(longest):
        for row in range(offsets.size - 1):
            at = offsets[row] + position
            if at < offsets[row + 1]:
                token = np.int64(tokens[at])
                count_choice(records, heads, sizes, weights, room, sequences, row, token, counts)
                append(records, heads, groups, sizes, weights, room, sequences, row, tokens, at, at + 1)


def headroom(path: Path) -> np.ndarray:
    """The counts of one recording, scope group."""
    recording = read_recording(path)
    weights, room, counts = context_mixing.make_weights(), context_mixing.make_room(), np.zeros(9)
    pairs = list(zip(recording.prompts, recording.responses, strict=True))
    for prompt, responses in tqdm(pairs, desc=path.stem, unit="prompt"):
        offsets = np.concatenate([[0], np.cumsum([len(response) for response in responses])]).astype(np.int64)
        texts = store.make_store(store.blocks_for(len(prompt) + int(offsets[-1])))
        sequences = context_mixing.make_sequences(len(responses) + 1, 1)
        last = len(responses)
        context_mixing.start(sequences, last, 0, store.add_group(*texts, 0), 0)
        store.reserve(*texts, 0, len(prompt) + int(offsets[-1]))
        append(*texts, weights, room, sequences, last, prompt, 0, len(prompt))
        for row in range(last):
            context_mixing.start(sequences, row, 0, sequences[last, END], len(prompt))
        play(*texts, weights, room, sequences, np.concatenate(responses), offsets, counts)
    return counts


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sam.headroom", description=__doc__.splitlines()[0])
    parser.add_argument("--traces", nargs="+", type=Path, required=True, help=".npz recordings")
    options = parser.parse_args(arguments)
    lines = [f"{'file':26} {'one candidate':>14} {'right':>6} | several: right (predicted), runner-up, any other"]
    try:
        for path in options.traces:
            c = headroom(path)
            several = c[SEVERAL:] / max(1.0, c[SEVERAL])
            lines.append(
                f"{path.name[:26]:26} {c[SINGLE] / c[TOKENS]:14.3f} {c[SINGLE_RIGHT] / max(1.0, c[SINGLE]):6.3f} | "
                f"{several[1]:.3f} ({several[2]:.3f}), {several[3]:.3f} ({several[4]:.3f}), {several[5]:.3f}"
            )
    except TraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
