"""How many draft tokens are accepted: a table of verify steps from really drafting on a recording.

A cell is a number of siblings that the drafter sees and a range of response positions; its records are verify steps:
the draft's acceptance probabilities, token by token, and how many of its tokens were right. A simulated request draws
a record for each of its steps, always the same one at the same position, whatever the policy did before.

`python -m sam.simulate.acceptance --traces FILES --drafter sam --k 3 --output TABLE.json` writes one.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from sam.jit import compiled
from sam.record.responses import Recording, TraceError, read_recording
from sam.replay.baselines import NAMES, make_drafter
from sam.replay.round_robin import Replay, replay_group

SIBLINGS = (1, 2, 4, 8, 16)
POSITIONS = (0, 256, 512, 1024, 2048, 4096, 8192)  # where ranges begin; the last one has no end
FEWEST_RECORDS = 200  # of a cell; with fewer it repeats the range before it
PERCENT = 100  # probabilities are kept in hundredths


class AcceptanceError(ValueError):
    """A table that cannot be read or made; one line says why."""


@dataclass(frozen=True)
class Acceptance:
    """Verify steps of every cell, one cell after the other, siblings first.

    Attributes:
        siblings: int64 [levels], rising from 1.
        starts, sizes: int64 [levels, ranges], where a cell's records lie.
        acceptance: float32 [records, k], cumulative acceptance probabilities, falling; 0 beyond a draft's end.
        drafted: int64 [records], tokens of the draft.
        accepted: int64 [records].
        source: recording and drafter.
    """

    siblings: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    acceptance: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    source: str = ""

    @property
    def k(self) -> int:
        return self.acceptance.shape[1]

    def level_of(self, siblings: np.ndarray) -> np.ndarray:
        """int64: for each number of siblings the nearest level, by ratio."""
        distance = np.abs(np.log(siblings[:, None]) - np.log(self.siblings[None, :]))
        return np.argmin(distance, axis=1)

    def mean_length(self, siblings: int, position: int) -> float:
        """Mean acceptance length of a cell: accepted tokens and the bonus token."""
        level = int(self.level_of(np.array([siblings]))[0])
        cell = level, int(np.searchsorted(POSITIONS, position, side="right")) - 1
        first = self.starts[cell]
        return 1.0 + float(self.accepted[first : first + self.sizes[cell]].mean())

    def save(self, path: Path, records: int = 128) -> None:
        """Write as JSON, at most `records` of each cell, evenly chosen from all of them in order of acceptance."""
        cells = []
        for level in range(len(self.siblings)):
            for first, size in zip(self.starts[level], self.sizes[level], strict=True):
                rows = np.arange(first, first + size)
                rows = rows[np.lexsort((self.acceptance[rows, 0], self.drafted[rows], self.accepted[rows]))]
                chosen = rows[((np.arange(min(records, size)) + 0.5) * size / min(records, size)).astype(np.int64)]
                percent = np.rint(PERCENT * self.acceptance[chosen]).astype(int)
                drafts = [p[:n].tolist() for p, n in zip(percent, self.drafted[chosen], strict=True)]
                cells.append([[int(a), *d] for a, d in zip(self.accepted[chosen], drafts, strict=True)])
        content = {"source": self.source, "k": self.k, "siblings": self.siblings.tolist(), "positions": list(POSITIONS)}
        body = ",\n".join(json.dumps(cell, separators=(",", ":")) for cell in cells)
        path.write_text(json.dumps(content)[:-1] + ', "cells": [\n' + body + "\n]}\n")

    @classmethod
    def load(cls, path: Path) -> Acceptance:
        """Read what `save` wrote.

        Raises:
            AcceptanceError: no such file, or not such a table.
        """
        try:
            content = json.loads(path.read_text())
            if tuple(content["positions"]) != POSITIONS:
                raise ValueError(f"positions {content['positions']}, expected {list(POSITIONS)}")
            cells = [[(row[1:], row[0]) for row in cell] for cell in content["cells"]]
            return _from_cells(cells, content["siblings"], content["k"], content["source"], fewest=1)
        except OSError:
            raise AcceptanceError(f"{path}: no such file") from None
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise AcceptanceError(f"{path}: not a table of acceptance ({error!r})") from error


class _Collector(Replay):
    """Keeps every verify step of a replay, by range of positions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.cells: list[list[tuple[np.ndarray, int]]] = [[] for _ in POSITIONS]

    def count(self, position: int, acceptance: np.ndarray, accepted: int, advanced: int) -> None:
        self.tokens += advanced
        place = int(np.searchsorted(POSITIONS, position, side="right")) - 1
        self.cells[place].append((np.rint(PERCENT * acceptance), accepted))


def measure(recording: Recording, make, k: int, levels=SIBLINGS, source: str = "", progress=None) -> Acceptance:
    """Draft on a recording, in lock-step as an engine does, once for each number of siblings.

    Args:
        make: makes a drafter (sam.replay.round_robin.replay).
        k: draft tokens.
        levels: samples of a prompt that share a drafter; beyond the most there are, only the next level is kept.
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
                replay_group(collector, make(), str(first), prompt, part, "engine", progress)
        cells += collector.cells
    return _from_cells(cells, levels, k, source, FEWEST_RECORDS)


def _from_cells(cells, siblings, k: int, source: str, fewest: int) -> Acceptance:
    shape = (len(siblings), len(POSITIONS))
    if len(cells) != shape[0] * shape[1] or not any(cells):
        raise AcceptanceError(f"{len(cells)} cells of verify steps, of them {sum(map(bool, cells))} with any")
    starts, sizes = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    records: list[tuple[np.ndarray, int]] = []
    for level in range(shape[0]):
        row = cells[level * shape[1] : (level + 1) * shape[1]]
        usable = [cell if len(cell) >= fewest else None for cell in row]
        first = next((cell for cell in usable if cell), max(row, key=len))
        for place, cell in enumerate(usable):
            if cell is None and place:
                starts[level, place], sizes[level, place] = starts[level, place - 1], sizes[level, place - 1]
                continue
            starts[level, place], sizes[level, place] = len(records), len(cell or first)
            records += cell or first
    acceptance = np.zeros((len(records), k), np.float32)
    for i, (percent, _) in enumerate(records):
        acceptance[i, : len(percent)] = np.asarray(percent) / PERCENT
    drafted = np.array([len(percent) for percent, _ in records])
    accepted = np.array([accepted for _, accepted in records])
    return Acceptance(np.array(siblings), starts, sizes, acceptance, drafted, accepted, source)


@compiled
def draw(requests, done, levels, edges, starts, sizes, seed):
    """int64: a record for each request, by its level and position: the same one whenever it is asked for again."""
    records = np.empty(requests.size, np.int64)
    for i in range(requests.size):
        x = (
            np.uint64(requests[i]) * np.uint64(0x9E3779B97F4A7C15)
            + np.uint64(done[i])
            + (np.uint64(seed) << np.uint64(40))
        )
        for shift, factor in ((30, np.uint64(0xBF58476D1CE4E5B9)), (27, np.uint64(0x94D049BB133111EB))):
            x = (x ^ (x >> np.uint64(shift))) * factor
        x ^= x >> np.uint64(31)
        level = levels[requests[i]]
        place = np.searchsorted(edges, done[i], side="right") - 1
        records[i] = starts[level, place] + np.int64((x >> np.uint64(11)) % np.uint64(sizes[level, place]))
    return records


@compiled
def drafts_of(records, acceptance, drafted, budgets, least):
    """Acceptance and offsets of the drafts, each within its budget and ending before a token accepted less often
    than `least`."""
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
    try:
        parts = [read_recording(path, options.tokenizer) for path in options.traces]
        recording = Recording([p for r in parts for p in r.prompts], [s for r in parts for s in r.responses])
        make = partial(make_drafter, options.drafter, "group", options.k)
        levels = SIBLINGS if options.drafter == "sam" else SIBLINGS[:1]
        source = f"{options.drafter}, k {options.k}, on {', '.join(path.stem for path in options.traces)}"
        with tqdm(total=recording.num_tokens * len(levels), unit="tok", mininterval=2.0) as bar:
            table = measure(recording, make, options.k, levels, source, bar.update)
        table.save(options.output, options.records)
    except (TraceError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for siblings in table.siblings.tolist():
        row = "  ".join(f"{position}: {table.mean_length(siblings, position):.2f}" for position in POSITIONS)
        print(f"{siblings:2} siblings, mean acceptance length from position  {row}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
