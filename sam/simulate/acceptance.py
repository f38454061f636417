"""Acceptance of draft tokens: a table of verify steps, recorded while drafting on recorded responses, and drafts.

A cell of the table is a number of siblings whose text the drafter sees and a range of response positions. Its records
are verify steps: the draft's cumulative acceptance probabilities and the number of its tokens that were accepted. A
simulated request draws a record for each of its steps, always the same one at the same position, whatever the policy
did before. Recorded responses can be drafted on themselves instead (`RealDrafts`).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
from tqdm import tqdm

from sam.drafting.drafter import Drafter
from sam.jit import compiled
from sam.reading import json_object, one_line
from sam.record.responses import Recording
from sam.replay.baselines import make_drafter
from sam.replay.round_robin import Replay, replay_group
from sam.simulate.workload import Round

SIBLINGS = (1, 2, 4, 8, 16)
POSITIONS = (0, 256, 512, 1024, 2048, 4096, 8192)  # tokens, where ranges begin; the last one has no end
EDGES = np.array(POSITIONS)
MIN_RECORDS = 200  # of a cell; with fewer it repeats the range before it
SAVED_RECORDS = 128  # of a cell at most
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

    def save(self, path: Path) -> None:
        """Write the table as JSON, at most SAVED_RECORDS of each cell: every n-th in order of acceptance."""
        cells = []
        for start, size in self.cells.ravel().tolist():
            order, count = np.arange(start, start + size), min(SAVED_RECORDS, size)
            order = order[np.lexsort((self.acceptance[order, 0], self.drafted[order], self.accepted[order]))]
            chosen = order[((np.arange(count) + 0.5) * size / count).astype(np.int64)].tolist()
            percent = np.rint(PERCENT * self.acceptance).astype(int)
            cells.append([[int(self.accepted[i]), *percent[i, : self.drafted[i]].tolist()] for i in chosen])
        content = {"source": self.source, "k": self.acceptance.shape[1], "siblings": self.siblings.tolist()}
        body = ",\n".join(json.dumps(cell, separators=(",", ":")) for cell in cells)
        path.write_text(f'{json.dumps(content)[:-1]}, "positions": {list(POSITIONS)}, "cells": [\n{body}\n]}}\n')

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


def measure(recording: Recording, k: int, source: str = "") -> Acceptance:
    """Draft up to `k` tokens with sam on a recording, for all samples of a prompt at once as an engine does, for each
    number of siblings."""
    most = max(len(samples) for samples in recording.responses)
    levels = [n for i, n in enumerate(SIBLINGS) if i == 0 or SIBLINGS[i - 1] < most]
    cells: list[list[tuple[np.ndarray, int]]] = []
    total = recording.num_tokens * len(levels)
    with tqdm(total=total, unit="tok", desc=f"drafting, k {k}", mininterval=2.0, disable=None) as bar:
        for siblings in levels:
            collector = _Collector(k)
            for prompt, samples in zip(recording.prompts, recording.responses, strict=True):
                for first in range(0, len(samples), siblings):
                    # All samples at every level, so that levels differ in nothing else.
                    drafter, part = make_drafter("sam", "group", k), samples[first : first + siblings]
                    replay_group(collector, [drafter], str(first), prompt, part, "engine", bar.update)
            cells += collector.cells
    return _from_cells(cells, levels, k, source, MIN_RECORDS)


def _from_cells(cells, siblings, k: int, source: str, min_records: int) -> Acceptance:
    shape = (len(siblings), len(POSITIONS))
    if len(cells) != shape[0] * shape[1] or not any(cells):
        raise ValueError(f"{len(cells)} cells of verify steps, of them {sum(map(bool, cells))} with any")
    places = np.zeros(shape, CELL)
    records: list[tuple[np.ndarray, int]] = []
    for level in range(shape[0]):
        ranges = cells[level * shape[1] : (level + 1) * shape[1]]
        first = next((cell for cell in ranges if len(cell) >= min_records), max(ranges, key=len))
        for i, cell in enumerate(ranges):
            if len(cell) < min_records and i:
                places[level, i] = places[level, i - 1]
                continue
            cell = cell if len(cell) >= min_records else first
            places[level, i] = len(records), len(cell)
            records += cell
    acceptance = np.zeros((len(records), k), np.float32)
    for i, (percent, _) in enumerate(records):
        acceptance[i, : len(percent)] = np.asarray(percent) / PERCENT
    drafted, accepted = np.array([(len(percent), accepted) for percent, accepted in records]).T
    return Acceptance(np.array(siblings), places, acceptance, drafted, accepted, source)


@compiled
def draw_records(requests, generated, levels, cells, seed):
    """Draw a record for each request, always the same one at the same position (by the finisher of SplitMix64).

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
        x = np.uint64(requests[i]) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(generated[i])
        x += np.uint64(seed) << np.uint64(40)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x ^= x >> np.uint64(31)
        cell = cells[levels[requests[i]], np.searchsorted(EDGES, generated[i], side="right") - 1]
        records[i] = cell.start + np.int64((x >> np.uint64(11)) % np.uint64(cell.size))
    return records


@compiled
def _read_drafts(records, acceptance, drafted, budgets, least):
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


class DrawnDrafts:
    """Drafts of a replica, drawn from a table of verify steps; requests are known by their numbers in the round.

    Args:
        levels: int64 [requests], the table's level of siblings for each request of the round.
        seed: another seed draws other records.
    """

    def __init__(self, table: Acceptance, levels: np.ndarray, seed: int = 0):
        self._table, self._levels, self._seed = table, levels, seed
        self._records = np.zeros(1, np.int64)

    def start(self, request: int) -> None:
        """Start to follow a request."""

    def finish(self, request: int) -> None:
        """Forget a complete request."""

    def append(self, requests: np.ndarray, generated: np.ndarray) -> None:
        """Show the drafter the new tokens of each request, which has `generated` tokens in all."""

    def draft(
        self, requests: np.ndarray, generated: np.ndarray, budgets: np.ndarray, min_acceptance: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draft up to `budgets` tokens (int64 [requests]) for each request, none less likely than `min_acceptance`.

        Returns:
            The drafts' cumulative acceptance probabilities, float32 [total], and offsets, int64 [requests + 1].
        """
        table = self._table
        self._records = draw_records(requests, generated, self._levels, table.cells, self._seed)
        return _read_drafts(self._records, table.acceptance, table.drafted, budgets, min_acceptance)

    def verify(self, lengths: np.ndarray) -> np.ndarray:
        """int64 [requests]: tokens accepted of the first `lengths` tokens of each draft just made."""
        return np.minimum(lengths, self._table.accepted[self._records])


class GroupDrafts(DrawnDrafts):
    """As `DrawnDrafts`, with the level of the text that a request's group has there at the time.

    A sibling counts by its text as a share of the request's own, at most as one: the table's siblings grow together.

    Args:
        prompts: int64 [requests], number of each one's prompt.
        replica_of: int64 [requests], where each runs; `delay`: tokens by which text is late elsewhere.
    """

    def __init__(self, table: Acceptance, prompts: np.ndarray, replica_of: np.ndarray, delay: int = 0, seed: int = 0):
        super().__init__(table, np.zeros(len(prompts), np.int64), seed)
        members = np.argsort(prompts, kind="stable")
        begins = np.searchsorted(prompts[members], np.arange(int(prompts.max(initial=0)) + 2))
        self._known = np.zeros(len(prompts), np.int64)
        self._group = prompts, replica_of, members, begins
        self._delay, self._edges = delay, np.sqrt(table.siblings[1:] * table.siblings[:-1])

    def append(self, requests, generated):
        self._known[requests] = generated

    def draft(self, requests, generated, budgets, min_acceptance):
        self._known[requests] = generated
        siblings = _count_siblings(requests, self._known, *self._group, self._delay)
        self._levels[requests] = np.searchsorted(self._edges, siblings, side="right")
        return super().draft(requests, generated, budgets, min_acceptance)


@compiled
def _count_siblings(requests, known, prompts, replica_of, members, begins, delay):
    """float64 [n]: samples of each request's prompt that its drafter sees, itself included, shorter ones in part.

    Args:
        requests: int64 [n].
        known, prompts, replica_of: int64 [all requests], tokens of each seen here, its prompt, and where it runs.
        members, begins: requests ordered by prompt, and where each prompt's begin.
        delay: tokens by which the text of another replica's requests is late.
    """
    count = np.ones(requests.size)
    for i in range(requests.size):
        prompt, own = prompts[requests[i]], max(1, known[requests[i]])
        for place in range(begins[prompt], begins[prompt + 1]):
            other = members[place]
            if other != requests[i]:
                late = delay if replica_of[other] != replica_of[requests[i]] else 0
                count[i] += min(1.0, max(0, known[other] - late) / own)
    return count


class RealDrafts:
    """As `DrawnDrafts`, with a drafter that follows the recorded responses as the simulated engine advances.

    Args:
        drafter: sam.drafting.drafter.Drafter or one of sam.replay.baselines.
        recorded: a round with its texts.
        number: the round's, in a rollout of several.
    """

    def __init__(self, drafter, recorded: Round, number: int = 0):
        self._drafter, self._round = drafter, recorded
        self._names = [f"{number}/{i}" for i in range(len(recorded))]
        self._shown = np.zeros(len(recorded), dtype=np.int64)
        self._takes_min_acceptance = isinstance(drafter, Drafter)
        self._last: tuple = ()

    def start(self, request: int) -> None:
        self._drafter.start(self._names[request], self._round.prompt_texts[self._round.prompts[request]])
        self._shown[request] = 0  # a drafter that goes on with a response is shown all of it

    def append(self, requests, generated):
        rows = zip(requests.tolist(), self._shown[requests].tolist(), generated.tolist(), strict=True)
        pieces = [self._round.responses[i][begin:end] for i, begin, end in rows]
        offsets = np.cumsum([0, *map(len, pieces)])
        self._drafter.append([self._names[i] for i in requests.tolist()], np.concatenate(pieces), offsets)
        self._shown[requests] = generated

    def draft(self, requests, generated, budgets, min_acceptance):
        least = (min_acceptance,) if self._takes_min_acceptance else ()
        drafts = self._drafter.draft([self._names[i] for i in requests.tolist()], budgets.astype(np.int32), *least)
        self._last = drafts, requests.tolist(), generated.tolist()
        return drafts.acceptance, drafts.offsets

    def verify(self, lengths):
        drafts, requests, generated = self._last
        accepted = np.zeros(len(lengths), np.int64)
        for row, (request, begin, length) in enumerate(zip(requests, generated, lengths.tolist(), strict=True)):
            text = self._round.responses[request][begin : begin + length]
            first = drafts.offsets[row]
            wrong = np.flatnonzero(drafts.token_ids[first : first + len(text)] != text)
            accepted[row] = wrong[0] if len(wrong) else len(text)
        return accepted

    def finish(self, request: int) -> None:
        self._drafter.finish(self._names[request])
