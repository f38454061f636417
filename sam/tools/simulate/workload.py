"""What the simulator plays: rounds of requests, and the drafts of each.

Lengths are drawn, or those of a recorded round. Drafts are drawn from a table that this package ships, or made on the
recorded responses themselves. A cell of the table is a number of siblings whose text the drafter sees and a range of
response positions. Its records are verify steps: the draft's cumulative acceptance probabilities and the number of its
tokens that were accepted. A simulated request draws a record for each of its steps, always the same one at the same
position, whatever the policy did before.
"""

import json
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

import numpy as np

from sam.drafting.drafter import Drafter
from sam.record.responses import Recording

NORMAL = NormalDist()
PROMPT_TOKENS = 128  # of a drawn request
SHIPPED = Path(__file__).parent / "step_costs"
EDGES = np.array((0, 256, 512, 1024, 2048, 4096, 8192))  # tokens, where ranges begin; the last one has no end
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
    median: float, cap: float, sigma: float, correlation: float, shape: tuple[int, int], seed: int = 0
) -> Round:
    """Draw a round of `shape` (prompts, samples) requests that arrive at once, of lengths median x exp(sigma z), cut
    at `cap` tokens.

    The part of z that the samples of a prompt share is stratified over the prompts, so that rounds differ less than
    with independent prompts; the rest is random.

    Args:
        sigma: standard deviation of the logarithm, over all responses.
        correlation: share of its variance that the samples of a prompt have in common.
    """
    rng = np.random.default_rng(seed)
    prompts, samples = shape
    common = np.array([NORMAL.inv_cdf((i + 0.5) / prompts) for i in range(prompts)])
    rng.shuffle(common)
    z = math.sqrt(correlation) * common[:, None] + math.sqrt(1 - correlation) * rng.standard_normal(shape)
    lengths = np.clip(np.rint(median * np.exp(sigma * z)), 1, cap).astype(np.int64).ravel()
    return Round(
        lengths=lengths,
        prompts=np.repeat(range(prompts), samples),
        prompt_tokens=np.full(len(lengths), PROMPT_TOKENS),
        arrivals=np.zeros(len(lengths)),
    )


def recorded_round(recording: Recording, arrivals: np.ndarray | None = None) -> Round:
    """Make a round of all responses of a recording, prompt by prompt; empty ones are left out."""
    pairs = [(prompt, text) for prompt, samples in enumerate(recording.responses) for text in samples if len(text)]
    return Round(
        lengths=np.array([len(text) for _, text in pairs]),
        prompts=np.array([prompt for prompt, _ in pairs]),
        prompt_tokens=np.array([len(recording.prompts[prompt]) for prompt, _ in pairs]),
        arrivals=np.zeros(len(pairs)) if arrivals is None else arrivals,
        prompt_texts=recording.prompts,
        responses=[text for _, text in pairs],
    )


class Acceptance(NamedTuple):
    """Verify steps by level of siblings, range of positions and number."""

    siblings: np.ndarray  # int64 [levels], samples of the prompt that the drafter sees, rising from 1
    acceptance: np.ndarray  # float32 [levels, ranges, records, k], cumulative probabilities, falling; 0 behind a draft
    drafted: np.ndarray  # int64 [levels, ranges, records], tokens of the draft
    accepted: np.ndarray  # int64 [levels, ranges, records], of these


@cache
def shipped_acceptance(k: int) -> Acceptance:
    """Read sam's table that this package ships for a draft length: of each cell as many records, by acceptance.

    Raises:
        ValueError: there is none.
    """
    path = SHIPPED / f"acceptance_sam_k{k}.json"
    if not path.is_file():
        known = sorted(int(file.stem.rpartition("k")[2]) for file in SHIPPED.glob("acceptance_sam_k*.json"))
        raise ValueError(f"--k {k}: expected one of {', '.join(map(str, known))}, of which acceptance is known")
    content = json.loads(path.read_text())
    records = []
    for cell in content["cells"]:
        for accepted, *percent in cell:
            missing = k - len(percent)
            records.append([accepted, len(percent), *percent] + missing * [0])
    table = np.array(records).reshape(len(content["siblings"]), len(EDGES), -1, 2 + k)
    return Acceptance(
        siblings=np.array(content["siblings"]),
        acceptance=(table[..., 2:] / PERCENT).astype(np.float32),
        drafted=table[..., 1],
        accepted=table[..., 0],
    )


class DrawnDrafts:
    """Drafts of a replica, drawn from a table of verify steps at the level of the text that a request's group has there
    at the time; requests are known by their numbers in the round.

    A sibling counts by its text as a share of the request's own, at most as one: the table's siblings grow together.

    Args:
        prompts: int64 [requests], number of each one's prompt.
        seed: another seed draws other records.
    """

    def __init__(self, table: Acceptance, prompts: np.ndarray, seed: int = 0):
        self._table = table
        self._prompts = prompts
        self._seed = seed
        self._known = np.zeros(len(prompts) + 1, np.int64)  # tokens of each seen here; the last is of nobody
        # Requests of each prompt, filled up with nobody.
        self._members = np.full((int(prompts.max()) + 1, int(np.bincount(prompts).max())), len(prompts))
        order = np.argsort(prompts, kind="stable")
        begins = np.searchsorted(prompts[order], prompts[order])
        self._members[prompts[order], np.arange(len(prompts)) - begins] = order
        self._edges = np.sqrt(table.siblings[1:] * table.siblings[:-1])
        self._records: tuple[np.ndarray, ...] = ()  # of the drafts just made, as the table's indices

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
        self._known[requests] = generated
        members = self._members[self._prompts[requests]]
        shares = self._known[members] / np.maximum(1, generated)[:, None]
        others = np.where(members == requests[:, None], 0.0, np.minimum(1.0, shares)).sum(axis=1)
        levels = np.searchsorted(self._edges, 1.0 + others, side="right")
        ranges = np.searchsorted(EDGES, generated, side="right") - 1
        number = _random(requests, generated, self._seed) % np.uint64(self._table.accepted.shape[-1])
        return self._drawn((levels, ranges, number.astype(np.int64)), budgets, min_acceptance)

    def _drawn(self, records: tuple[np.ndarray, ...], budgets, min_acceptance) -> tuple[np.ndarray, np.ndarray]:
        self._records = records
        acceptance = self._table.acceptance[records]
        longest = np.minimum(budgets, self._table.drafted[records])
        # Probabilities fall within a draft.
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
        number: of the recorded round, in a rollout of several.
    """

    def __init__(self, drafter: Drafter, recorded: Round, number: int = 0):
        self._drafter = drafter
        self._round = recorded
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
        names = [self._names[i] for i in requests.tolist()]
        drafts = self._drafter.draft(names, budgets.astype(np.int32), min_acceptance)
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
