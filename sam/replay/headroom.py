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

from sam.automaton.store import NONE, add_group, blocks_for, make_store, reserve
from sam.drafting.batch import append
from sam.drafting.context_mixing import contexts_at_end, make_learned, predict, probability_of
from sam.drafting.sequences import make_sequences, start_sequence
from sam.jit import kernel
from sam.record.responses import read_recording

# What is counted: tokens, those with a single candidate, of these the right ones; tokens whose contexts disagree, and
# of these: choice right, choice's probability, runner-up right, runner-up's probability, any other context's right.
TOKENS, SINGLE, SINGLE_RIGHT, SEVERAL, RIGHT, PREDICTED, SECOND_RIGHT, SECOND_PREDICTED, OTHER_RIGHT = range(9)


@kernel
def count_choice(store, learned, text, token, counts):
    """Count one token before it is appended."""
    nodes, mixing = store.nodes, learned.mixing
    contexts, _ = contexts_at_end(store, text)
    chosen, probability = predict(store, mixing, contexts)
    second, second_probability = np.int64(NONE), 0.0
    for context in contexts:
        if context.state == NONE or context.token == chosen:
            continue
        p = probability_of(store, mixing, contexts, context.token)
        if p > second_probability:
            second, second_probability = context.token, p
    counts[TOKENS] += 1
    right_elsewhere = second != NONE and second == token
    state = np.int64(text.end)
    while state != NONE and nodes[state].length > 0:
        if nodes[state].total_count != 0 and nodes[nodes[state].argmax_edge].token == token:
            right_elsewhere = True
        state = np.int64(nodes[state].link)
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


@kernel
def play(store, learned, sequences, tokens, offsets, counts):
    """All samples of a prompt, a token each in turn; sample i is tokens[offsets[i]:offsets[i + 1]], in slot i."""
    longest = 0
    for slot in range(offsets.size - 1):
        longest = max(longest, offsets[slot + 1] - offsets[slot])
    for position in range(longest):
        for slot in range(offsets.size - 1):
            at = offsets[slot] + position
            if at < offsets[slot + 1]:
                count_choice(store, learned, sequences.texts[slot], np.int64(tokens[at]), counts)
                append(store, learned, sequences, slot, tokens, at, at + 1)


def headroom(path: Path) -> np.ndarray:
    """The counts of one recording, scope group."""
    recording = read_recording(path)
    learned, counts = make_learned(), np.zeros(9)
    pairs = list(zip(recording.prompts, recording.responses, strict=True))
    for prompt, responses in tqdm(pairs, desc=path.stem, unit="prompt"):
        offsets = np.concatenate([[0], np.cumsum([len(response) for response in responses])]).astype(np.int64)
        tokens = len(prompt) + int(offsets[-1])
        store = make_store(blocks_for(tokens))
        sequences = make_sequences(len(responses) + 1, 1)
        last = len(responses)
        start_sequence(sequences, last, 0, add_group(store, 0), 0)
        reserve(store, 0, tokens)
        append(store, learned, sequences, last, prompt, 0, len(prompt))
        for slot in range(last):
            start_sequence(sequences, slot, 0, sequences.texts[last]["end"], len(prompt))
        play(store, learned, sequences, np.concatenate(responses), offsets, counts)
    return counts


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
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
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
