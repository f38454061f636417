"""The requests of a rollout, and which of their draft tokens are accepted.

Lengths are drawn from a log-normal fit, or those of recorded responses. Acceptance is drawn from a table of verify
steps, or that of drafts on the recorded responses themselves. A cell of the table is a number of siblings whose text
the drafter sees and a range of response positions. Its records are verify steps, recorded while drafting on responses:
the draft's cumulative acceptance probabilities and the number of its tokens that were accepted. A simulated request
draws a record for each of its steps, always the same one at the same position, whatever the policy did before.
"""

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from sam.drafting.drafter import Drafter
from sam.record.responses import Recording
from sam.replay import Replay, make_drafter

NORMAL = NormalDist()
PROMPT_TOKENS = 128  # of a drawn request
SHIPPED = Path(__file__).parent / "step_costs"
SIBLINGS = (1, 2, 4, 8, 16)
EDGES = np.array((0, 256, 512, 1024, 2048, 4096, 8192))  # tokens, where ranges begin; the last one has no end
MIN_RECORDS = 200  # of a cell; with fewer it repeats the range before it
CELL = np.dtype([("start", np.int64), ("size", np.int64)])  # the records of a cell
PERCENT = 100  # probabilities are kept in hundredths


@dataclass(frozen=True)
class Round:
    """A generation round: requests in the order in which they queue.

    Attributes:
        lengths: int64 [requests], response tokens, at least 1.
        prompts: int64 [requests], number of each one's prompt, from 0.
        prompt_tokens: int64 [requests].
        arrivals: float64 [requests], milliseconds from the round's begin.
        prompt_texts: int32 arrays by prompt; responses: int32 arrays by request; both only of recorded rounds.
    """

    lengths: np.ndarray
    prompts: np.ndarray
    prompt_tokens: np.ndarray
    arrivals: np.ndarray
    prompt_texts: list[np.ndarray] | None = None
    responses: list[np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all responses."""
        return int(self.lengths.sum())


def log_normal(
    mean: float, cap: float, sigma: float, correlation: float, shape: tuple[int, int], seed: int = 0
) -> Round:
    """Draw a round of `shape` (prompts, samples) requests that arrive at once, of lengths exp(mu + sigma z).

    The part of z that the samples of a prompt share is stratified over the prompts, so that rounds differ less than
    with independent prompts; the rest is random.

    Args:
        mean: tokens, of the lengths cut at `cap` tokens; mu follows from it.
        sigma: standard deviation of the logarithm, over all responses.
        correlation: share of its variance that the samples of a prompt have in common.

    Raises:
        ValueError: no such distribution.
    """
    cap = int(cap)
    if not 1 <= mean < cap:
        raise ValueError(f"lengths: mean {mean:g}: expected at least 1 and less than the cap {cap}")
    if not 0 < sigma <= 3 or not 0 <= correlation <= 1:
        raise ValueError(
            f"lengths: sigma {sigma:g}, correlation {correlation:g}: expected sigma above 0 up to 3, correlation from "
            "0 to 1"
        )
    low, high = 0.0, math.log(cap) + 4 * sigma**2  # of mu, by bisection
    for _ in range(60):
        mu = (low + high) / 2
        above = (math.log(cap) - mu) / sigma
        cut_mean = math.exp(mu + sigma**2 / 2) * NORMAL.cdf(above - sigma) + cap * (1 - NORMAL.cdf(above))
        low, high = (mu, high) if cut_mean < mean else (low, mu)
    rng, (prompts, samples) = np.random.default_rng(seed), shape
    common = np.array([NORMAL.inv_cdf((i + 0.5) / prompts) for i in range(prompts)])
    rng.shuffle(common)
    z = math.sqrt(correlation) * common[:, None] + math.sqrt(1 - correlation) * rng.standard_normal(shape)
    lengths = np.clip(np.rint(np.exp(low + sigma * z)), 1, cap).astype(np.int64).ravel()
    count = len(lengths)
    return Round(lengths, np.repeat(range(prompts), samples), np.full(count, PROMPT_TOKENS), np.zeros(count))


def recorded_round(recording: Recording, arrivals: np.ndarray | None = None) -> Round:
    """Make a round of all responses of a recording, prompt by prompt; empty ones are left out."""
    pairs = [(prompt, text) for prompt, samples in enumerate(recording.responses) for text in samples if len(text)]
    lengths, prompts = np.array([len(text) for _, text in pairs]), np.array([prompt for prompt, _ in pairs])
    prompt_tokens = np.array([len(recording.prompts[prompt]) for prompt in prompts])
    arrivals = np.zeros(len(pairs)) if arrivals is None else arrivals
    return Round(lengths, prompts, prompt_tokens, arrivals, recording.prompts, [text for _, text in pairs])


class Acceptance(NamedTuple):
    """Verify steps of all cells, by level of siblings and then by range of positions."""

    siblings: np.ndarray  # int64 [levels], samples of the prompt that the drafter sees, rising from 1
    cells: np.ndarray  # CELL [levels, ranges], the records of each cell
    acceptance: np.ndarray  # float32 [records, k], cumulative probabilities, falling; 0 beyond a draft's end
    drafted: np.ndarray  # int64 [records], tokens of the draft
    accepted: np.ndarray  # int64 [records], of these


@cache
def shipped_acceptance(k: int) -> Acceptance:
    """Read sam's table that this package ships for a draft length: of each cell every n-th record, by acceptance.

    Raises:
        ValueError: there is none.
    """
    path = SHIPPED / f"acceptance_sam_k{k}.json"
    if not path.is_file():
        raise ValueError(f"{path}: no such file; name a recording to draft on with --acceptance")
    content = json.loads(path.read_text())
    return _from_cells(content["cells"], content["siblings"], k, min_records=1)


class _Collector(Replay):
    """The verify steps of a replay by range of positions, each as in a shipped file: [accepted, percent, ...]."""

    def __init__(self, *settings):
        super().__init__(*settings)
        self.cells: list[list[list]] = [[] for _ in EDGES]

    def count(self, position: int, acceptance: np.ndarray, accepted: int, advanced: int) -> None:
        self.tokens += advanced
        record = [accepted, *np.rint(PERCENT * acceptance)]
        self.cells[np.searchsorted(EDGES, position, side="right") - 1].append(record)


def measure(recording: Recording, k: int) -> Acceptance:
    """Draft up to `k` tokens with sam on a recording, for all samples of a prompt at once as an engine does, for each
    number of siblings.

    Raises:
        ValueError: a recording without tokens.
    """
    if not recording.num_tokens:
        raise ValueError("the recording holds no response: there is nothing to draft on")
    most = max(map(len, recording.responses))
    levels = [n for i, n in enumerate(SIBLINGS) if i == 0 or SIBLINGS[i - 1] < most]
    cells, total = [], recording.num_tokens * len(levels)
    with tqdm(total=total, unit="tok", desc=f"drafting, k {k}", mininterval=2.0, disable=None) as bar:
        for siblings in levels:
            collector = _Collector(k, "engine", None, bar.update)
            for prompt, *samples in recording.groups():
                for first in range(0, len(samples[0]), siblings):
                    # All samples at every level, so that levels differ in nothing else.
                    drafter, part = make_drafter("sam", "group", k), (one[first : first + siblings] for one in samples)
                    collector.group([drafter], str(first), prompt, *part)
            cells += collector.cells
    return _from_cells(cells, levels, k, MIN_RECORDS)


def _from_cells(cells: list[list[list]], siblings: list[int], k: int, min_records: int) -> Acceptance:
    places, records = np.zeros((len(siblings), len(EDGES)), CELL), []
    for level, row in enumerate(places):
        ranges = cells[level * len(EDGES) : (level + 1) * len(EDGES)]
        first = next((cell for cell in ranges if len(cell) >= min_records), max(ranges, key=len))
        for i, cell in enumerate(ranges):
            if len(cell) < min_records and i:
                row[i] = row[i - 1]
                continue
            cell = cell if len(cell) >= min_records else first
            row[i] = len(records), len(cell)
            records += cell
    acceptance = np.zeros((len(records), k), np.float32)
    for i, (_, *percent) in enumerate(records):
        acceptance[i, : len(percent)] = np.asarray(percent) / PERCENT
    drafted, accepted = np.array([(len(record) - 1, record[0]) for record in records]).T
    return Acceptance(np.array(siblings), places, acceptance, drafted, accepted)


class DrawnDrafts:
    """Drafts of a replica, drawn from a table of verify steps at the level of the text that a request's group has there
    at the time; requests are known by their numbers in the round.

    A sibling counts by its text as a share of the request's own, at most as one: the table's siblings grow together.

    Args:
        prompts: int64 [requests], number of each one's prompt.
        replica_of: int64 [requests], where each runs.
        delay: tokens by which text is late in other replicas.
        seed: another seed draws other records.
    """

    def __init__(self, table: Acceptance, prompts: np.ndarray, replica_of: np.ndarray, delay: int = 0, seed: int = 0):
        self._table, self._seed = table, seed
        self._prompts, self._replica_of, self._delay = prompts, np.append(replica_of, -1), delay
        self._known = np.zeros(len(prompts) + 1, np.int64)  # tokens of each seen here; the last is of nobody
        # Requests of each prompt, filled up with nobody.
        self._members = np.full((int(prompts.max()) + 1, int(np.bincount(prompts).max())), len(prompts))
        order = np.argsort(prompts, kind="stable")
        begins = np.searchsorted(prompts[order], prompts[order])
        self._members[prompts[order], np.arange(len(prompts)) - begins] = order
        self._edges = np.sqrt(table.siblings[1:] * table.siblings[:-1])
        self._records = np.zeros(1, np.int64)

    def start(self, request: int) -> None:
        """Start to follow a request."""

    def finish(self, request: int) -> None:
        """Forget a complete request."""

    def append(self, requests: np.ndarray, generated: np.ndarray) -> None:
        """Show the drafter the new tokens of each request, which has `generated` tokens in all."""
        self._known[requests] = generated

    def draft(
        self, requests: np.ndarray, generated: np.ndarray, budgets: np.ndarray, min_acceptance: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draft up to `budgets` tokens (int64 [requests]) for each request, none less likely than `min_acceptance`.

        Returns:
            The drafts' cumulative acceptance probabilities, float32 [total], and offsets, int64 [requests + 1].
        """
        table, self._known[requests] = self._table, generated
        members = self._members[self._prompts[requests]]
        late = np.where(self._replica_of[members] == self._replica_of[requests][:, None], 0, self._delay)
        shares = np.maximum(0, self._known[members] - late) / np.maximum(1, self._known[requests])[:, None]
        others = np.where(members == requests[:, None], 0.0, np.minimum(1.0, shares)).sum(axis=1)
        levels = np.searchsorted(self._edges, 1.0 + others, side="right")
        cell = table.cells[levels, np.searchsorted(EDGES, generated, side="right") - 1]
        number = _random(requests, generated, self._seed) % cell["size"].astype(np.uint64)
        self._records = cell["start"] + number.astype(np.int64)
        acceptance, longest = table.acceptance[self._records], np.minimum(budgets, table.drafted[self._records])
        # They fall within a draft.
        kept = (np.arange(acceptance.shape[1]) < longest[:, None]) & (acceptance >= min_acceptance)
        return acceptance[kept], np.append(0, np.cumsum(kept.sum(axis=1)))

    def verify(self, lengths: np.ndarray) -> np.ndarray:
        """int64 [requests]: tokens accepted of the first `lengths` tokens of each draft just made."""
        return np.minimum(lengths, self._table.accepted[self._records])


def _random(requests: np.ndarray, generated: np.ndarray, seed: int) -> np.ndarray:
    """uint64 [n]: a number for each request at each of its positions, by the finisher of SplitMix64."""
    x = requests.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + generated.astype(np.uint64) + np.uint64(seed << 40)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))) >> np.uint64(11)


class RealDrafts:
    """As `DrawnDrafts`, with a drafter that follows the recorded responses as the simulated engine advances.

    Args:
        drafter: sam.drafting.drafter.Drafter or one of sam.replay.
        number: of the recorded round, in a rollout of several.
    """

    def __init__(self, drafter, recorded: Round, number: int = 0):
        self._drafter, self._round = drafter, recorded
        self._names = [f"{number}/{i}" for i in range(len(recorded))]
        self._shown = np.zeros(len(recorded), dtype=np.int64)
        self._last: tuple = ()

    def start(self, request: int) -> None:
        self._drafter.start(self._names[request], self._round.prompt_texts[self._round.prompts[request]])
        self._shown[request] = 0  # a drafter that goes on with a response is shown all of it

    def finish(self, request: int) -> None:
        self._drafter.finish(self._names[request])

    def append(self, requests, generated):
        rows = zip(requests.tolist(), self._shown[requests].tolist(), generated.tolist(), strict=True)
        pieces = [self._round.responses[i][begin:end] for i, begin, end in rows]
        offsets = np.cumsum([0, *map(len, pieces)])
        self._drafter.append([self._names[i] for i in requests.tolist()], np.concatenate(pieces), offsets)
        self._shown[requests] = generated

    def draft(self, requests, generated, budgets, min_acceptance):
        least = (min_acceptance,) if isinstance(self._drafter, Drafter) else ()
        drafts = self._drafter.draft([self._names[i] for i in requests.tolist()], budgets.astype(np.int32), *least)
        self._last = drafts, requests.tolist(), generated.tolist()
        return drafts.acceptance, drafts.offsets

    def verify(self, lengths):
        drafts, requests, generated = self._last
        accepted = np.zeros(len(lengths), np.int64)
        for row, (request, begin, length) in enumerate(zip(requests, generated, lengths.tolist(), strict=True)):
            text, first = self._round.responses[request][begin : begin + length], drafts.offsets[row]
            wrong = np.flatnonzero(drafts.token_ids[first : first + len(text)] != text)
            accepted[row] = wrong[0] if len(wrong) else len(text)
        return accepted
