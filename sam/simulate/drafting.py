"""Drafts of simulated requests: drawn from a table of acceptance, or really drafted on the recorded responses."""

import numpy as np

from sam.drafting.drafter import Drafter
from sam.jit import compiled
from sam.simulate.acceptance import Acceptance, draw_records, read_drafts
from sam.simulate.lengths import Round

ZERO = np.zeros(1, np.int64)


class DrawnDrafts:
    """Drafts of a replica, drawn from a table of verify steps; requests are known by their numbers in the round.

    Args:
        levels: int64 [requests], the table's level of siblings for each request of the round.
        seed: another seed draws other records.
    """

    def __init__(self, table: Acceptance, levels: np.ndarray, seed: int = 0):
        self._table, self._levels, self._seed = table, levels, seed
        self._records = ZERO

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
        return read_drafts(self._records, table.acceptance, table.drafted, budgets, min_acceptance)

    def verify(self, lengths: np.ndarray) -> np.ndarray:
        """int64 [requests]: tokens accepted of the first `lengths` tokens of each draft just made."""
        return np.minimum(lengths, self._table.accepted[self._records])


class GroupDrafts(DrawnDrafts):
    """As `DrawnDrafts`, with the level of the text that a request's group has there at the time.

    A sibling counts by its text as a share of the request's own, at most as one: the table's siblings grow together.

    Args:
        prompts: int64 [requests], number of each one's prompt.
    """

    def __init__(self, table: Acceptance, prompts: np.ndarray, seed: int = 0):
        super().__init__(table, np.zeros(len(prompts), np.int64), seed)
        self._prompts, self._known = prompts, np.zeros(len(prompts), np.int64)
        self._members = np.argsort(prompts, kind="stable")
        self._begins = np.searchsorted(prompts[self._members], np.arange(int(prompts.max(initial=0)) + 2))
        self._edges = np.sqrt(table.siblings[1:] * table.siblings[:-1])

    def append(self, requests, generated):
        self._known[requests] = generated

    def draft(self, requests, generated, budgets, min_acceptance):
        self._known[requests] = generated
        known = count_siblings(requests, self._known, self._prompts, self._members, self._begins)
        self._levels[requests] = np.searchsorted(self._edges, known, side="right")
        return super().draft(requests, generated, budgets, min_acceptance)


class RealDrafts:
    """As `DrawnDrafts`, with a drafter that follows the recorded responses as the simulated engine advances.

    Args:
        drafter: sam.drafting.drafter.Drafter or one of sam.replay.baselines.
        recorded: a round with its texts.
        number: the round's, in a rollout of several.
    """

    def __init__(self, drafter, recorded: Round, number: int = 0):
        self._drafter, self._round, self._number = drafter, recorded, number
        self._text = np.concatenate(recorded.responses)
        self._begins = np.concatenate([[0], np.cumsum(recorded.lengths)])
        self._names = [f"{number}/{i}" for i in range(len(recorded))]
        self._shown = np.zeros(len(recorded), dtype=np.int64)
        self._has_acceptance = isinstance(drafter, Drafter)
        self._last: tuple[np.ndarray, ...] = ()

    def start(self, request: int) -> None:
        prompt = self._round.prompt_texts[self._round.prompts[request]]
        self._drafter.start(self._names[request], prompt)
        self._shown[request] = 0  # a drafter that goes on with a response is shown all of it

    def append(self, requests, generated):
        begins, ends = self._begins[requests] + self._shown[requests], self._begins[requests] + generated
        pieces = [self._text[b:e] for b, e in zip(begins.tolist(), ends.tolist(), strict=True)]
        offsets = np.concatenate([ZERO, np.cumsum(ends - begins)])
        self._drafter.append([self._names[i] for i in requests.tolist()], np.concatenate(pieces), offsets)
        self._shown[requests] = generated

    def draft(self, requests, generated, budgets, min_acceptance):
        names = [self._names[i] for i in requests.tolist()]
        more = (min_acceptance,) if self._has_acceptance else ()
        drafts = self._drafter.draft(names, budgets.astype(np.int32), *more)
        self._last = drafts.token_ids, drafts.offsets, requests, generated
        return drafts.acceptance, drafts.offsets

    def verify(self, lengths):
        tokens, offsets, requests, generated = self._last
        begins = self._begins[requests] + generated
        return count_accepted(tokens, offsets, lengths, self._text, begins, self._begins[requests + 1])

    def finish(self, request: int) -> None:
        self._drafter.finish(self._names[request])


Drafting = DrawnDrafts | RealDrafts


@compiled
def count_siblings(requests, known, prompts, members, begins):
    """float64 [n]: samples of each request's prompt that its drafter sees, itself included, shorter ones in part.

    Args:
        requests: int64 [n]; known, prompts: int64 [all requests], tokens of each seen here, and its prompt.
        members, begins: requests ordered by prompt, and where each prompt's begin.
    """
    count = np.ones(requests.size)
    for i in range(requests.size):
        prompt, own = prompts[requests[i]], max(1, known[requests[i]])
        for place in range(begins[prompt], begins[prompt + 1]):
            if members[place] != requests[i]:
                count[i] += min(1.0, known[members[place]] / own)
    return count


@compiled
def count_accepted(tokens, offsets, lengths, text, begins, ends):
    """int64 [drafts]: tokens of each draft, of its first `lengths`, that its text goes on with; it ends at `ends`."""
    accepted = np.zeros(lengths.size, np.int64)
    for i in range(lengths.size):
        for j in range(min(lengths[i], ends[i] - begins[i])):
            if tokens[offsets[i] + j] != text[begins[i] + j]:
                break
            accepted[i] += 1
    return accepted
