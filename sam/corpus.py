"""`sam corpus build INPUT -o corpus.sam`: a static automaton of texts known beforehand.

As in SAM-Decoding (Hu et al., 2024): rollouts of an earlier run, for example. A drafter maps the file into memory,
shares it with the other processes of the machine, never changes it, and drafts from it where its match is longer than
the group's by a margin. Inputs are recordings as `sam.replay` reads them, or JSONL rows with token ids under `tokens`.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from sam.automaton.corpus_file import corpus_of, save_corpus
from sam.automaton.store import BLOCK_BYTES, blocks_for
from sam.command import Parser, run_command
from sam.reading import ReadError, json_rows, token_ids
from sam.record.responses import read_recording


def read_texts(path: Path, tokenizer: str | None) -> Iterator[np.ndarray]:
    """The token ids of each text: rows of `tokens`, or a recording's responses, each after its prompt.

    Raises:
        ReadError: not a file of either kind.
    """
    if path.suffix == ".jsonl" and "tokens" in next(json_rows(path, lambda row, _: row), {}):
        yield from json_rows(path, lambda row, place: token_ids(row.get("tokens"), f"{place}, tokens"))
        return
    recording = read_recording(path, tokenizer)
    for prompt, responses in zip(recording.prompts, recording.responses, strict=True):
        for response in responses:
            yield np.concatenate([prompt, response])


def build(inputs: list[Path], output: Path, tokenizer: str | None = None) -> int:
    """Build the automaton of all texts and save it; returns the number of their tokens.

    Raises:
        ReadError: an input cannot be read, or none has a token.
        ValueError: the memory of the machine is too small for the texts.
    """
    texts = [text for path in inputs for text in read_texts(path, tokenizer) if len(text)]
    total = sum(len(text) for text in texts)
    if not total:
        raise ReadError(f"{', '.join(map(str, inputs))}: no token in any text")
    needed, available = blocks_for(total) * BLOCK_BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > available:
        raise ValueError(f"{total} tokens need {needed >> 20} MiB of memory, this machine has {available >> 20}")
    save_corpus(corpus_of(tqdm(texts, unit="text", desc=output.name), total), output)
    return total


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="sam corpus", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("build", help="build an automaton from texts")
    command.add_argument("inputs", nargs="+", type=Path, help=".jsonl or .npz")
    command.add_argument("-o", "--output", type=Path, required=True)
    command.add_argument("--tokenizer", help="for verl's dumps of text: folder or name of the tokenizer")
    options = parser.parse_args(arguments)

    def built() -> Iterator[str]:
        tokens = build(options.inputs, options.output, options.tokenizer)
        size = sum(file.stat().st_size for file in options.output.iterdir())
        yield f"{options.output}: {tokens} tokens, {size >> 10} KiB"
        yield f"use it with speculation.corpus={options.output.resolve()}"

    return run_command(built)
