"""Drafts of simulated requests: drawn from a table of acceptance, or really drafted on the recorded responses."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from sam.drafting.drafter import Drafter
from sam.jit import compiled
from sam.simulate.acceptance import POSITIONS, Acceptance, drafts_of, draw
from sam.simulate.lengths import Round

EDGES = np.array(POSITIONS)
BOUND = np.zeros(1, np.int64)


class Drafting(Protocol):
    """What the drafter of a replica does for the requests of a round, which are known by their numbers."""

    def start(self, request: int) -> None: ...

    def append(self, requests: np.ndarray, done: np.ndarray) -> None:
        """Show the drafter what is new of each request, of which `done` tokens are there."""
        ...

    def draft(
        self, requests: np.ndarray, done: np.ndarray, budgets: np.ndarray, min_acceptance: float
    ) -> tuple[np.ndarray, np.ndarray]:
        """Cumulative acceptance probabilities (float32 [total]) and offsets (int64 [requests + 1]) of the drafts."""
        ...

    def verify(self, lengths: np.ndarray) -> np.ndarray:
        """int64: how many are accepted of the first `lengths` tokens of each draft just made."""
        ...

    def finish(self, request: int) -> None: ...


class DrawnDrafts:
    """Drafts and their fate from a table.

    Args:
        levels: int64, the table's level of siblings for each request of the round.
        seed: another seed draws other records.
    """

    def __init__(self, table: Acceptance, levels: np.ndarray, seed: int = 0):
        self._table, self._levels, self._seed = table, levels, seed
        self._records = BOUND

    def start(self, request: int) -> None:
        pass

    finish = start

    def append(self, requests: np.ndarray, done: np.ndarray) -> None:
        pass

    def draft(self, requests, done, budgets, min_acceptance):
        table = self._table
        self._records = draw(requests, done, self._levels, EDGES, table.starts, table.sizes, self._seed)
        return drafts_of(self._records, table.acceptance, table.drafted, budgets, min_acceptance)

    def verify(self, lengths):
        return np.minimum(lengths, self._table.accepted[self._records])


class RealDrafts:
    """A drafter that follows the recorded responses as the simulated engine advances.

    Args:
        drafter: sam.drafting.drafter.Drafter or one of sam.replay.baselines.
        recorded: a round with its texts.
        number: of the round, in a rollout of several.
    """

    def __init__(self, drafter, recorded: Round, number: int = 0):
        if recorded.responses is None:
            raise ValueError("drafting for real needs recorded responses, not drawn lengths")
        self._drafter, self._round, self._number = drafter, recorded, number
        self._text = np.concatenate(recorded.responses)
        self._begins = np.concatenate([[0], np.cumsum(recorded.lengths)])
        self._names = [f"{number}/{i}" for i in range(len(recorded))]
        self._told = np.zeros(len(recorded), dtype=np.int64)
        self._has_acceptance = isinstance(drafter, Drafter)
        self._last: tuple[np.ndarray, ...] = ()

    def start(self, request: int) -> None:
        prompt = self._round.prompt_texts[self._round.prompts[request]]
        self._drafter.start(self._names[request], prompt)

    def append(self, requests, done):
        begins, ends = self._begins[requests] + self._told[requests], self._begins[requests] + done
        pieces = [self._text[b:e] for b, e in zip(begins.tolist(), ends.tolist(), strict=True)]
        offsets = np.concatenate([BOUND, np.cumsum(ends - begins)])
        self._drafter.append([self._names[i] for i in requests.tolist()], np.concatenate(pieces), offsets)
        self._told[requests] = done

    def draft(self, requests, done, budgets, min_acceptance):
        names = [self._names[i] for i in requests.tolist()]
        more = (min_acceptance,) if self._has_acceptance else ()
        drafts = self._drafter.draft(names, budgets.astype(np.int32), *more)
        self._last = drafts.token_ids, drafts.offsets, requests, done
        return drafts.acceptance, drafts.offsets

    def verify(self, lengths):
        tokens, offsets, requests, done = self._last
        begins = self._begins[requests] + done
        return count_right(tokens, offsets, lengths, self._text, begins, self._begins[requests + 1])

    def finish(self, request: int) -> None:
        self._drafter.finish(self._names[request])


@compiled
def count_right(tokens, offsets, lengths, text, begins, ends):
    """int64: how many of the first `lengths` tokens of each draft are those of its text, which ends at `ends`."""
    right = np.zeros(lengths.size, np.int64)
    for i in range(lengths.size):
        for j in range(min(lengths[i], ends[i] - begins[i])):
            if tokens[offsets[i] + j] != text[begins[i] + j]:
                break
            right[i] += 1
    return right
