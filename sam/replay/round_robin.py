"""Recorded responses replayed as an engine that speculates would have generated them.

All samples of a prompt start together. In every round each of them drafts, has its draft compared with the recorded
tokens, and advances by the accepted tokens and the bonus token. A replica is a drafter: samples may be spread over
several, which see the tokens of samples elsewhere late or never.
"""

import time

import numpy as np

from sam.record.responses import Recording
from sam.replay.elsewhere import Inbox, inbox_of

POSITION_BIN = 512  # tokens of a response per point of the acceptance-by-position table
PROBABILITY_BINS = 10
ORDERS = ("turns", "engine")  # samples within a round: round robin, each seeing the one before, or all at once
# Samples of several epochs: all at once; epoch by epoch, the first one not counted; so, with new drafters each time.
EPOCHS = ("together", "kept", "forgotten")


class Replay:
    """Counts of one replay; by position in the draft, by tenth of the probability, and by position in the response."""

    def __init__(self, draft_length: int, position_bin: int = POSITION_BIN):
        self.draft_length, self.position_bin = draft_length, position_bin
        self.tokens = self.steps = self.drafted = self.accepted = 0
        self.accepted_at, self.drafted_at = np.zeros((2, draft_length), dtype=np.int64)
        self.by_probability = np.zeros((PROBABILITY_BINS, 3))  # drafts, sum of their probabilities, accepted
        self.by_position: dict[int, list[int]] = {}  # tokens and steps

    def count(self, position: int, acceptance: np.ndarray, accepted: int, advanced: int) -> None:
        """Count a verify step at response position `position`; `acceptance` are its drafts' probabilities."""
        drafted = len(acceptance)
        self.steps += 1
        self.tokens += advanced
        self.drafted += drafted
        self.accepted += accepted
        self.drafted_at[:drafted] += 1
        self.accepted_at[:accepted] += 1
        sums = self.by_position.setdefault(position // self.position_bin, [0, 0])
        sums[0] += advanced
        sums[1] += 1
        for i, probability in enumerate(acceptance.tolist()):
            row = self.by_probability[min(PROBABILITY_BINS - 1, int(PROBABILITY_BINS * probability))]
            row += (1, probability, i < accepted)

    def summary(self) -> dict:
        """The results; mean acceptance length counts the bonus token, 1.0 is no gain."""
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "mean_acceptance_length": round(self.tokens / max(1, self.steps), 4),
            "acceptance_rate": round(self.accepted / max(1, self.drafted), 4),
            "acceptance_per_position": [
                round(float(a) / max(1, int(d)), 4) for a, d in zip(self.accepted_at, self.drafted_at, strict=True)
            ],
            "calibration_error": round(max(abs(p - o) for p, o in self.calibration()), 4) if self.drafted else None,
        }

    def calibration(self) -> list[tuple[float, float]]:
        """(predicted probability, observed acceptance) of each tenth of the predictions that has drafts."""
        return [(float(p / n), float(o / n)) for n, p, o in self.by_probability if n]

    def positions(self) -> list[tuple[int, float]]:
        """(first response position of the bin, mean acceptance length in it)."""
        return [(b * self.position_bin, tokens / steps) for b, (tokens, steps) in sorted(self.by_position.items())]


def replay(
    recording: Recording,
    make,
    draft_length: int,
    samples: int | None = None,
    order: str = "turns",
    progress=None,
    position_bin: int = POSITION_BIN,
    replicas: int = 1,
    delay: int | None = None,
    epochs: str = "together",
) -> Replay:
    """Replay all prompts, one after the other.

    Args:
        recording: prompts with their responses.
        make: makes a drafter (start, append, draft, finish as sam.drafting.drafter.Drafter), once for each replica or,
            with `samples`, for every `samples` samples.
        draft_length: draft tokens of a sample in a step.
        samples: samples of a prompt that share a drafter, and all that it ever sees; None: all.
        order: one of ORDERS.
        progress: called with the tokens advanced since the last call.
        position_bin: tokens of a response per point of `Replay.positions`.
        replicas, delay: of `replay_group`; with `samples` there is one replica.
        epochs: one of EPOCHS.

    Raises:
        ValueError: the recording has fewer than two epochs, and they are not taken together.
    """
    result = Replay(draft_length, position_bin)
    parts = [recording] if epochs == "together" else recording.by_epoch()
    for epoch, part in enumerate(parts):
        if epoch == 0 or epochs == "forgotten":
            drafters = [make() for _ in range(replicas)]
        counts = Replay(draft_length, position_bin) if epoch == 0 and len(parts) > 1 else result
        for index, (prompt, responses) in enumerate(zip(part.prompts, part.responses, strict=True)):
            size = samples or max(1, len(responses))
            for first in range(0, len(responses), size):
                if samples:
                    drafters = [make()]
                name, shared = f"{index}/{first}", responses[first : first + size]
                replay_group(counts, drafters, name, prompt, shared, order, progress, delay, epoch)
    return result


class Request:
    """A recorded response, generated on one of the replicas.

    Attributes:
        accepted: tokens that are generated.
        shown_to_drafter: of them, those that the drafter of its replica has seen.
        shown_elsewhere: of them, those that the other replicas' drafters have seen.
        rounds_since_end: of the group, after its last token.
    """

    def __init__(self, name: str, response: np.ndarray, replica: int = 0):
        self.name, self.response, self.replica = name, response, replica
        self.accepted = self.shown_to_drafter = self.shown_elsewhere = self.rounds_since_end = 0

    def verify(self, draft: np.ndarray) -> tuple[int, int]:
        """Accept the draft's correct tokens and the bonus token.

        Returns:
            The accepted draft tokens, and the tokens by which the response advanced.
        """
        recorded = self.response[self.accepted :]
        length = min(len(draft), len(recorded))
        different = np.flatnonzero(draft[:length] != recorded[:length])
        accepted = int(different[0]) if different.size else length
        advanced = min(accepted + 1, len(recorded))
        self.accepted += advanced
        return accepted, advanced

    @property
    def finished(self) -> bool:
        """Whether the response is complete."""
        return self.accepted == len(self.response)

    def arrived(self, delay: int) -> int:
        """Tokens that have reached other replicas. After the last one each round of the group counts as a token."""
        return max(0, min(self.accepted, self.accepted + self.rounds_since_end - delay))


def replay_group(
    result: Replay,
    drafters: list,
    name: str,
    prompt: np.ndarray,
    responses: list[np.ndarray],
    order: str,
    progress=None,
    delay: int | None = None,
    policy_version: int = 0,
) -> None:
    """Replay samples of one prompt, spread round robin over replicas, and count them in `result`.

    Args:
        drafters: one for each replica.
        delay: tokens that a sample generates after a token before the other replicas' drafters have seen that one;
            None: they never do.
    """
    requests = [
        Request(f"{name}/{i}", response, i % len(drafters)) for i, response in enumerate(responses) if len(response)
    ]
    inboxes = [inbox_of(drafter) for drafter in drafters] if delay is not None else []
    for request in requests:
        drafters[request.replica].start(request.name, prompt, policy_version)
    others = [[request.name for request in requests if request.replica != replica] for replica in range(len(inboxes))]
    for inbox, names in zip(inboxes, others, strict=True):
        inbox.start(names, prompt, policy_version)
    live = requests
    while live:
        before = result.tokens
        for batch in [live] if order == "engine" else [[request] for request in live]:
            for replica, drafter in enumerate(drafters):
                if own := [request for request in batch if request.replica == replica]:
                    _draft_and_verify(result, drafter, own)
            if delay is not None:
                _deliver(inboxes, batch, delay)
        if progress:
            progress(result.tokens - before)
        live = [request for request in live if not request.finished]
        if delay is not None:
            for request in (ended := [request for request in requests if request.finished]):
                request.rounds_since_end += 1
            _deliver(inboxes, ended, 0 if not live else delay)
    for inbox, names in zip(inboxes, others, strict=True):
        inbox.finish(names)
    for request in requests:
        drafters[request.replica].finish(request.name)


def _draft_and_verify(result: Replay, drafter, batch: list[Request]) -> None:
    positions = [request.accepted for request in batch]
    budgets = np.full(len(batch), result.draft_length, dtype=np.int32)
    drafts = drafter.draft([request.name for request in batch], budgets)
    for row, (request, position) in enumerate(zip(batch, positions, strict=True)):
        part = slice(drafts.offsets[row], drafts.offsets[row + 1])
        accepted, advanced = request.verify(drafts.token_ids[part])
        result.count(position, drafts.acceptance[part], accepted, advanced)
    append(drafter, batch)


def _deliver(inboxes: list[Inbox], batch: list[Request], delay: int) -> None:
    """Show the other replicas' drafters the tokens of the batch that have reached them."""
    batch = [request for request in batch if request.arrived(delay) > request.shown_elsewhere]
    for replica, inbox in enumerate(inboxes):
        if others := [request for request in batch if request.replica != replica]:
            inbox.deliver(
                [request.name for request in others],
                [request.shown_elsewhere for request in others],
                [request.response[request.shown_elsewhere : request.arrived(delay)] for request in others],
            )
    for request in batch:
        request.shown_elsewhere = request.arrived(delay)


def append(drafter, batch: list[Request]) -> float:
    """Show the drafter the batch's new tokens; returns the seconds that it took."""
    pieces = [request.response[request.shown_to_drafter : request.accepted] for request in batch]
    offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)
    names, tokens = [request.name for request in batch], np.concatenate(pieces)
    started = time.perf_counter()
    drafter.append(names, tokens, offsets)
    seconds = time.perf_counter() - started
    for request in batch:
        request.shown_to_drafter = request.accepted
    return seconds
