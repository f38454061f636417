"""`python -m sam.headroom --traces FILES`: what choosing the context better could bring, and why it cannot.

An oracle that always drafts from the suffix whose continuation turns out right accepts more than any drafter that has
to choose beforehand. This counts, token by token, how often the text's contexts disagree, how often the choice is right
then, and how often the runner-up would have been, beside the probabilities given to both beforehand. Where these agree
with what was observed, and the choice is the likelier one, the rest of the distance is luck that one path cannot have.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

from sam.automaton.store import NONE, add_group, blocks_for, make_store, reserve
from sam.command import run_command
from sam.drafting.batch import append
from sam.drafting.context_mixing import contexts_at_end, predict, probability_of
from sam.drafting.mixing_weights import make_learned
from sam.drafting.prompt_memory import make_memory
from sam.drafting.sequences import make_sequences, start_sequence
from sam.drafting.sources import nothing
from sam.jit import kernel
from sam.record.responses import read_recording

# Tokens; those with a single candidate, and the right ones of them; those whose contexts disagree, and of them: choice
# right, choice's probability, runner-up right, runner-up's probability, any other context's right.
_COUNTS = (
    "tokens",
    "single",
    "single_right",
    "several",
    "right",
    "predicted",
    "second_right",
    "second_predicted",
    "other_right",
)
COUNTS = np.dtype([(name, "f8") for name in _COUNTS], align=True)


@kernel
def count_choice(store, learned, text, token, counts):
    """Count one token before it is appended; `counts` is a COUNTS record."""
    nodes, mixing = store.nodes, learned.mixing
    contexts, match_len = contexts_at_end(store, text)
    chosen, probability = predict(store, mixing, contexts, match_len, (nothing(),))
    second, second_probability = np.int64(NONE), 0.0
    for context in contexts:
        if context.state == NONE or context.token == chosen:
            continue
        p = probability_of(store, mixing, contexts, match_len, (nothing(),), context.token)
        if p > second_probability:
            second, second_probability = context.token, p
    counts.tokens += 1
    if second == NONE:
        counts.single += 1
        counts.single_right += chosen == token
        return
    right_elsewhere = second == token
    state = np.int64(text.end)
    while state != NONE and nodes[state].length > 0:
        if nodes[state].total_count != 0 and nodes[nodes[state].argmax_edge].token == token:
            right_elsewhere = True
        state = np.int64(nodes[state].link)
    counts.several += 1
    counts.right += chosen == token
    counts.predicted += probability
    counts.second_right += second == token
    counts.second_predicted += second_probability
    counts.other_right += right_elsewhere and chosen != token


@kernel
def play(store, memory, learned, sequences, tokens, offsets, longest, counts):
    """All samples of a prompt, a token each in turn; sample i is tokens[offsets[i]:offsets[i + 1]], in slot i."""
    for position in range(longest):
        for slot in range(offsets.size - 1):
            at = offsets[slot] + position
            if at < offsets[slot + 1]:
                count_choice(store, learned, sequences.texts[slot], np.int64(tokens[at]), counts[0])
                append(store, memory, learned, sequences, slot, tokens, at, at + 1)


def headroom(path: Path) -> np.void:
    """The COUNTS of one recording, scope group."""
    recording = read_recording(path)
    learned, memory, counts = make_learned(), make_memory(0), np.zeros(1, COUNTS)
    pairs = list(zip(recording.prompts, recording.responses, strict=True))
    for prompt, responses in tqdm(pairs, desc=path.stem, unit="prompt"):
        offsets = np.concatenate([[0], np.cumsum([len(response) for response in responses])]).astype(np.int64)
        tokens, last = len(prompt) + int(offsets[-1]), len(responses)
        store, sequences = make_store(blocks_for(tokens)), make_sequences(last + 1, 1)
        start_sequence(sequences, last, 0, add_group(store, 0), prompt[:0], 0)
        reserve(store, 0, tokens)
        append(store, memory, learned, sequences, last, prompt, 0, len(prompt))
        for slot in range(last):
            start_sequence(sequences, slot, 0, sequences.texts[last]["end"], prompt, 0)
        play(store, memory, learned, sequences, np.concatenate(responses), offsets, max(map(len, responses)), counts)
    return counts[0]


def table(paths: list[Path]) -> str:
    """A line for each recording."""
    lines = [f"{'file':26} {'one candidate':>14} {'right':>6} | several: right (predicted), runner-up, any other"]
    for path in paths:
        c = headroom(path)
        right, predicted, second_right, second_predicted, other = (
            c[name] / max(1.0, c["several"]) for name in _COUNTS[_COUNTS.index("right") :]
        )
        lines.append(
            f"{path.name[:26]:26} {c['single'] / c['tokens']:14.3f} {c['single_right'] / max(1.0, c['single']):6.3f} | "
            f"{right:.3f} ({predicted:.3f}), {second_right:.3f} ({second_predicted:.3f}), {other:.3f}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sam.headroom", description=__doc__.splitlines()[0])
    parser.add_argument("--traces", nargs="+", type=Path, required=True, help=".npz recordings")
    options = parser.parse_args(arguments)
    return run_command(lambda: table(options.traces))


if __name__ == "__main__":
    sys.exit(main())
