"""`python -m sam.corpus build INPUT -o corpus.sam`: a static automaton of texts known beforehand.

As in SAM-Decoding (Hu et al., 2024): rollouts of an earlier run, for example. A drafter maps the file into memory,
shares it with the other processes of the machine, never changes it, and drafts from it where its match is longer than
the group's by a margin. Inputs are recordings as `sam.replay` reads them, or JSONL rows with token ids under `tokens`.
An interrupted build goes on where it last saved.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from sam.automaton.store import BLOCK_BYTES, blocks_for
from sam.drafting.corpus import SuffixAutomaton
from sam.record.responses import TraceError, read_recording

SECONDS_BETWEEN_SAVES = 60.0


def read_texts(path: Path, tokenizer: str | None) -> Iterator[np.ndarray]:
    """The token ids of each text: rows of `tokens`, or a recording's responses, each after its prompt.

    Raises:
        TraceError: not a file of either kind.
    """
    if path.suffix == ".jsonl" and path.is_file():
        with path.open() as file:
            first = file.readline()
            if '"tokens"' in first:
                file.seek(0)
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield _tokens_of(path, number, line)
                return
    recording = read_recording(path, tokenizer)
    for prompt, responses in zip(recording.prompts, recording.responses, strict=True):
        for response in responses:
            yield np.concatenate([prompt, response])


def _tokens_of(path: Path, number: int, line: str) -> np.ndarray:
    try:
        return np.array(json.loads(line)["tokens"], dtype=np.int32)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise TraceError(f"{path}, line {number}: expected a row with a list of token ids under tokens") from error


def build(
    inputs: list[Path], output: Path, tokenizer: str | None = None, save_every: float = SECONDS_BETWEEN_SAVES
) -> int:
    """Build the automaton of all texts and save it; returns its tokens.

    Raises:
        TraceError: an input cannot be read.
        ValueError: the memory of the machine is too small for the texts.
    """
    texts = [text for path in inputs for text in read_texts(path, tokenizer) if len(text)]
    total = sum(len(text) for text in texts)
    needed, available = blocks_for(total) * BLOCK_BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > available:
        raise ValueError(f"{total} tokens need {needed >> 20} MiB of memory, this machine has {available >> 20}")
    partial = output.with_name(output.name + ".building")
    fingerprint = f"{len(texts)} texts, {total} tokens, {_digest(texts)}"
    automaton, done = _resume(partial, fingerprint, needed)
    saved = time.monotonic()
    with tqdm(total=total, initial=sum(len(text) for text in texts[:done]), unit="tok", desc=output.name) as bar:
        for number, text in enumerate(texts[done:], done + 1):
            automaton.add(text)
            bar.update(len(text))
            if time.monotonic() - saved >= save_every:
                _save_partial(automaton, partial, fingerprint, number)
                saved = time.monotonic()
    automaton.save(output)
    for leftover in (partial, _notes(partial)):
        leftover.unlink(missing_ok=True)
    return automaton.num_tokens


def _digest(texts: list[np.ndarray]) -> str:
    checksum = 0
    for text in texts:
        checksum = zlib.crc32(text, checksum)
    return f"{checksum:08x}"


def _notes(partial: Path) -> Path:
    return partial.with_name(partial.name + ".json")


def _save_partial(automaton: SuffixAutomaton, partial: Path, fingerprint: str, done: int) -> None:
    """The notes leave first and come last, so that they never describe another file."""
    _notes(partial).unlink(missing_ok=True)
    automaton.save(partial)
    _notes(partial).write_text(json.dumps({"inputs": fingerprint, "done": done}))


def _resume(partial: Path, fingerprint: str, needed: int) -> tuple[SuffixAutomaton, int]:
    """What an interrupted build of the same inputs has left, or an empty automaton; and its texts."""
    if _notes(partial).is_file():
        notes = json.loads(_notes(partial).read_text())
        if notes["inputs"] == fingerprint:
            print(f"going on after {notes['done']} texts of an interrupted build", file=sys.stderr)
            return SuffixAutomaton.load(partial).thawed(needed), notes["done"]
    return SuffixAutomaton(needed, 1, 1), 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sam.corpus", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("build", help="build an automaton from texts")
    command.add_argument("inputs", nargs="+", type=Path, help=".jsonl or .npz")
    command.add_argument("-o", "--output", type=Path, required=True)
    command.add_argument("--tokenizer", help="for verl's dumps of text: folder or name of the tokenizer")
    options = parser.parse_args(arguments)
    try:
        tokens = build(options.inputs, options.output, options.tokenizer)
    except (TraceError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    size = options.output.stat().st_size
    print(f"{options.output}: {tokens} tokens, {size >> 10} KiB")
    print(f"use it with speculation.corpus={options.output.resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
