"""Acceptance of draft tokens: a table of verify steps, recorded while drafting on recorded responses.

A cell of the table is a number of siblings whose text the drafter sees and a range of response positions. Its records
are verify steps: the draft's cumulative acceptance probabilities and the number of its tokens that were accepted. A
simulated request draws a record for each of its steps, always the same one at the same position, whatever the policy
did before.

`python -m sam.simulate.acceptance --traces FILES --drafter sam --k 3 --output TABLE.json` writes one.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np
from tqdm import tqdm

from sam.command import run_command
from sam.jit import compiled
from sam.reading import json_object, one_line
from sam.record.responses import Recording, join, read_recording
from sam.replay.baselines import NAMES, make_drafter
from sam.replay.round_robin import Replay, replay_group

SIBLINGS = (1, 2, 4, 8, 16)
POSITIONS = (0, 256, 512, 1024, 2048, 4096, 8192)  # tokens, where ranges begin; the last one has no end
EDGES = np.array(POSITIONS)
MIN_RECORDS = 200  # of a cell; with fewer it repeats the range before it
CELL = np.dtype([("start", np.int64), ("size", np.int64)])  # the records of a cell
PERCENT = 100  # probabilities are kept in hundredths


@dataclass(frozen=True)
class Acceptance:
    """Verify steps of all cells, by level of siblings and then by range of positions.

    Attributes:
        siblings: int64 [levels], samples of the prompt that the drafter sees, rising from 1.
        cells: CELL [levels, ranges], the records of each cell.
        acceptance: float32 [records, k], cumulative acceptance probabilities, falling; 0 beyond a draft's end.
        drafted: int64 [records], tokens of the draft.
        accepted: int64 [records], accepted tokens of the draft.
        source: recording and drafter.
    """

    siblings: np.ndarray
    cells: np.ndarray
    acceptance: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    source: str = ""

    @property
    def k(self) -> int:
        """Tokens of a draft at most."""
        return self.acceptance.shape[1]

    def level_of(self, siblings: np.ndarray) -> np.ndarray:
        """int64 [n]: the nearest level, by ratio, for each number of siblings."""
        return np.abs(np.log(siblings[:, None] / self.siblings)).argmin(axis=1)

    def mean_length(self, siblings: int, position: int) -> float:
        """Mean acceptance length of a cell: accepted tokens and the bonus token."""
        level = int(self.level_of(np.array([siblings]))[0])
        cell = self.cells[level, np.searchsorted(EDGES, position, side="right") - 1]
        return 1.0 + float(self.accepted[cell["start"] : cell["start"] + cell["size"]].mean())

    def save(self, path: Path, records: int = 128) -> None:
        """Write the table as JSON, at most `records` of each cell: every n-th in order of acceptance."""
        cells = []
        for start, size in self.cells.ravel().tolist():
            order = np.arange(start, start + size)
            order = order[np.lexsort((self.acceptance[order, 0], self.drafted[order], self.accepted[order]))]
            chosen = order[((np.arange(min(records, size)) + 0.5) * size / min(records, size)).astype(np.int64)]
            percent = np.rint(PERCENT * self.acceptance[chosen]).astype(int)
            drafts = [p[:n].tolist() for p, n in zip(percent, self.drafted[chosen], strict=True)]
            cells.append([[int(a), *d] for a, d in zip(self.accepted[chosen], drafts, strict=True)])
        content = {"source": self.source, "k": self.k, "siblings": self.siblings.tolist(), "positions": list(POSITIONS)}
        body = ",\n".join(json.dumps(cell, separators=(",", ":")) for cell in cells)
        path.write_text(json.dumps(content)[:-1] + ', "cells": [\n' + body + "\n]}\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a table that `save` wrote.

        Raises:
            ValueError: no such file, or not such a table.
        """
        with one_line(str(path), "not a table of acceptance"):
            content = json_object(path)
            if tuple(content["positions"]) != POSITIONS:
                raise ValueError(f"positions {content['positions']}, expected {list(POSITIONS)}")
            cells = [[(row[1:], row[0]) for row in cell] for cell in content["cells"]]
            return _from_cells(cells, content["siblings"], content["k"], content["source"], min_records=1)


class _Collector(Replay):
    """Collects the verify steps of a replay by range of positions."""

    def __init__(self, draft_length: int):
        super().__init__(draft_length)
        self.cells: list[list[tuple[np.ndarray, int]]] = [[] for _ in POSITIONS]

    def count(self, position: int, acceptance: np.ndarray, accepted: int, advanced: int) -> None:
        self.tokens += advanced
        self.cells[np.searchsorted(EDGES, position, side="right") - 1].append((np.rint(PERCENT * acceptance), accepted))


def measure(recording: Recording, make, k: int, levels=SIBLINGS, source: str = "", progress=None) -> Acceptance:
    """Draft on a recording, for all samples of a prompt at once as an engine does, for each number of siblings.

    Args:
        make: makes a drafter (sam.replay.round_robin.replay).
        k: draft tokens of a request.
        levels: numbers of samples that share a drafter, rising; of those above the largest group the first is used.
        progress: called with the response tokens replayed since the last call.
    """
    most = max(len(samples) for samples in recording.responses)
    levels = [n for i, n in enumerate(levels) if i == 0 or levels[i - 1] < most]
    cells: list[list[tuple[np.ndarray, int]]] = []
    for siblings in levels:
        collector = _Collector(k)
        for prompt, samples in zip(recording.prompts, recording.responses, strict=True):
            for first in range(0, len(samples), siblings):
                # All samples at every level, so that levels differ in nothing else.
                part = samples[first : first + siblings]
                replay_group(collector, [make()], str(first), prompt, part, "engine", progress)
        cells += collector.cells
    return _from_cells(cells, levels, k, source, MIN_RECORDS)


def measure_on(paths: list[Path], tokenizer: str | None, drafter: str, k: int) -> Acceptance:
    """Draft on recordings, with a progress bar; `drafter` is one of sam.replay.baselines.NAMES."""
    recording = join([read_recording(path, tokenizer) for path in paths])
    levels = SIBLINGS if drafter == "sam" else SIBLINGS[:1]
    source = f"{drafter}, k {k}, on {', '.join(path.stem for path in paths)}"
    total = recording.num_tokens * len(levels)
    with tqdm(total=total, unit="tok", desc=f"drafting, k {k}", mininterval=2.0, disable=None) as bar:
        return measure(recording, partial(make_drafter, drafter, "group", k), k, levels, source, bar.update)


def _from_cells(cells, siblings, k: int, source: str, min_records: int) -> Acceptance:
    shape = (len(siblings), len(POSITIONS))
    if len(cells) != shape[0] * shape[1] or not any(cells):
        raise ValueError(f"{len(cells)} cells of verify steps, of them {sum(map(bool, cells))} with any")
    places = np.zeros(shape, CELL)
    records: list[tuple[np.ndarray, int]] = []
    for level in range(shape[0]):
        ranges = cells[level * shape[1] : (level + 1) * shape[1]]
        usable = [cell if len(cell) >= min_records else None for cell in ranges]
        first = next((cell for cell in usable if cell), max(ranges, key=len))
        for i, cell in enumerate(usable):
            if cell is None and i:
                places[level, i] = places[level, i - 1]
                continue
            places[level, i] = len(records), len(cell or first)
            records += cell or first
    acceptance = np.zeros((len(records), k), np.float32)
    for i, (percent, _) in enumerate(records):
        acceptance[i, : len(percent)] = np.asarray(percent) / PERCENT
    drafted = np.array([len(percent) for percent, _ in records])
    accepted = np.array([accepted for _, accepted in records])
    return Acceptance(np.array(siblings), places, acceptance, drafted, accepted, source)


@compiled
def hashed(request, generated, seed):
    """uint64: a random number for a request with so many tokens, always the same one (the finisher of SplitMix64)."""
    x = np.uint64(request) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(generated)
    x += np.uint64(seed) << np.uint64(40)
    for shift, factor in ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB))):
        x = (x ^ (x >> np.uint64(shift))) * factor
    return x ^ (x >> np.uint64(31))


@compiled
def draw_records(requests, generated, levels, cells, seed):
    """Draw a record for each request, always the same one at the same position.

    Args:
        requests: int64 [n], numbers of the requests.
        generated: int64 [n], tokens of each.
        levels: int64 [all requests], their levels of siblings.
        cells: CELL [levels, ranges].
        seed: int.

    Returns:
        int64 [n].
    """
    records = np.empty(requests.size, np.int64)
    for i in range(requests.size):
        x = hashed(requests[i], generated[i], seed)
        cell = cells[levels[requests[i]], np.searchsorted(EDGES, generated[i], side="right") - 1]
        records[i] = cell.start + np.int64((x >> np.uint64(11)) % np.uint64(cell.size))
    return records


@compiled
def read_drafts(records, acceptance, drafted, budgets, least):
    """Probabilities and offsets of the records' drafts, each cut to its budget and before a token below `least`."""
    offsets = np.zeros(records.size + 1, np.int64)
    kept = np.empty(records.size * acceptance.shape[1], np.float32)
    end = 0
    for i in range(records.size):
        for j in range(min(budgets[i], drafted[records[i]])):
            if acceptance[records[i], j] < least:
                break
            kept[end] = acceptance[records[i], j]
            end += 1
        offsets[i + 1] = end
    return kept[:end], offsets


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sam.simulate.acceptance", description=__doc__.splitlines()[0])
    parser.add_argument("--traces", nargs="+", type=Path, required=True, help=".npz recordings or .jsonl dumps")
    parser.add_argument("--drafter", choices=NAMES, default="sam")
    parser.add_argument("--k", type=int, default=3, help="draft tokens per step (default 3)")
    parser.add_argument("--records", type=int, default=128, help="verify steps kept of each cell (default 128)")
    parser.add_argument("--tokenizer", help="for .jsonl dumps: folder or name of the tokenizer")
    parser.add_argument("--output", type=Path, required=True, help="table to write")
    options = parser.parse_args(arguments)

    def shown() -> Iterator[str]:
        table = measure_on(options.traces, options.tokenizer, options.drafter, options.k)
        table.save(options.output, options.records)
        for siblings in table.siblings.tolist():
            row = "  ".join(f"{position}: {table.mean_length(siblings, position):.2f}" for position in POSITIONS)
            yield f"{siblings:2} siblings, mean acceptance length from position  {row}"

    return run_command(shown)


if __name__ == "__main__":
    sys.exit(main())
