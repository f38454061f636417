"""Recorded responses replayed as an engine that speculates would have generated them.

All samples of a prompt start together. In every round each of them drafts, has its draft compared with the recorded
tokens, and advances by the accepted tokens and the bonus token. A replica is a drafter: samples may be spread over
several, which see the tokens of samples elsewhere late or never.
"""

import time

import numpy as np

from sam.record.responses import Recording

PROBABILITY_BINS = 10
ORDERS = ("turns", "engine")  # samples within a round: round robin, each seeing the one before, or all at once
# Samples of several epochs: all at once; epoch by epoch, the first one not counted; so, with new drafters each time.
EPOCHS = ("together", "kept", "forgotten")


class Replay:
    """Counts of one replay; by position in the draft, and by tenth of the probability."""

    def __init__(self, draft_length: int):
        self.draft_length = draft_length
        self.tokens = self.steps = self.drafted = self.accepted = 0
        self.accepted_at, self.drafted_at = np.zeros((2, draft_length), dtype=np.int64)
        self.by_probability = np.zeros((PROBABILITY_BINS, 3))  # drafts, sum of their probabilities, accepted

    def count(self, position: int, acceptance: np.ndarray, accepted: int, advanced: int) -> None:
        """Count a verify step at response position `position`; `acceptance` are its drafts' probabilities."""
        drafted = len(acceptance)
        self.steps += 1
        self.tokens += advanced
        self.drafted += drafted
        self.accepted += accepted
        self.drafted_at[:drafted] += 1
        self.accepted_at[:accepted] += 1
        for i, probability in enumerate(acceptance.tolist()):
            row = self.by_probability[min(PROBABILITY_BINS - 1, int(PROBABILITY_BINS * probability))]
            row += (1, probability, i < accepted)

    def summary(self) -> dict:
        """The results; mean acceptance length counts the bonus token, 1.0 is no gain."""
        by_place = zip(self.accepted_at.tolist(), self.drafted_at.tolist(), strict=True)
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "mean_acceptance_length": round(self.tokens / max(1, self.steps), 4),
            "acceptance_rate": round(self.accepted / max(1, self.drafted), 4),
            "acceptance_per_position": [round(accepted / max(1, drafted), 4) for accepted, drafted in by_place],
            "calibration_error": round(max(abs(p - o) for p, o in self.calibration()), 4) if self.drafted else None,
        }

    def calibration(self) -> list[tuple[float, float]]:
        """(predicted probability, observed acceptance) of each tenth of the predictions that has drafts."""
        return [(float(p / n), float(o / n)) for n, p, o in self.by_probability if n]


class Request:
    """A recorded response, generated on one of the replicas.

    Attributes:
        accepted: tokens that are generated; the drafter of its replica has seen them.
        seen_elsewhere: of them, those that the other replicas' drafters have seen.
        rounds_since_end: of the group, after its last token.
    """

    def __init__(self, name: str, response: np.ndarray, replica: int = 0):
        self.name, self.response, self.replica = name, response, replica
        self.accepted = self.seen_elsewhere = self.rounds_since_end = 0

    def verify(self, draft: np.ndarray) -> tuple[int, np.ndarray]:
        """Accept the draft's correct tokens and the bonus token; returns how many of the draft, and the new tokens."""
        left = self.response[self.accepted :]
        length = min(len(draft), len(left))
        different = np.flatnonzero(draft[:length] != left[:length])
        accepted = int(different[0]) if different.size else length
        self.accepted += len(new := left[: accepted + 1])
        return accepted, new

    @property
    def finished(self) -> bool:
        """Whether the response is complete."""
        return self.accepted == len(self.response)

    def arrive(self, delay: int) -> np.ndarray:
        """Return the tokens that reach other replicas now; after the last one a round of the group counts as a token.

        Args:
            delay: tokens that are generated after a token before that one arrives.
        """
        seen, end = self.seen_elsewhere, min(self.accepted, self.accepted + self.rounds_since_end - delay)
        self.seen_elsewhere = max(seen, end)
        return self.response[seen : self.seen_elsewhere]


def replay(recording: Recording, make, draft_length: int, replicas: int = 1, epochs: str = "together", **how) -> Replay:
    """Replay all prompts, one after the other.

    Args:
        recording: prompts with their responses.
        make: makes a drafter (start, append, draft, finish as sam.drafting.drafter.Drafter), once for each replica.
        draft_length: draft tokens of a sample in a step.
        replicas: over which the samples of a prompt are spread, round robin.
        epochs: one of EPOCHS.
        how: `order`, `progress` and `delay` of `replay_group`.

    Raises:
        ValueError: the recording has fewer than two epochs, and they are not taken together.
    """
    result = Replay(draft_length)
    parts = [recording] if epochs == "together" else recording.by_epoch()
    for epoch, part in enumerate(parts):
        if epoch == 0 or epochs == "forgotten":
            drafters = [make() for _ in range(replicas)]
        counts = Replay(draft_length) if epoch == 0 and len(parts) > 1 else result
        for index, (prompt, responses) in enumerate(zip(part.prompts, part.responses, strict=True)):
            replay_group(counts, drafters, str(index), prompt, responses, policy_version=epoch, **how)
    return result


def replay_group(
    result: Replay,
    drafters: list,
    name: str,
    prompt: np.ndarray,
    responses: list[np.ndarray],
    order: str = "turns",
    progress=None,
    delay: int | None = None,
    policy_version: int = 0,
) -> None:
    """Replay samples of one prompt, spread round robin over replicas, and count them in `result`.

    To a drafter a sample that is generated elsewhere is one more request, for which it does not draft. A replica
    without a sample of the prompt gets none.

    Args:
        drafters: one for each replica.
        order: one of ORDERS.
        progress: called with the tokens advanced since the last call.
        delay: tokens that a sample generates after a token before the other replicas' drafters have seen that one;
            None: they never do.
    """
    replicas = len(drafters)
    requests = [Request(f"{name}/{i}", text, i % replicas) for i, text in enumerate(responses) if len(text)]
    shown = [[one for one in requests if one.replica == i or delay is not None] for i in range(replicas)]
    shown = [its if any(one.replica == i for one in its) else [] for i, its in enumerate(shown)]
    for drafter, its in zip(drafters, shown, strict=True):
        for request in its:
            drafter.start(request.name, prompt, policy_version)

    def deliver(batch: list[Request], delay: int) -> None:
        arrived = [(request, new) for request in batch if len(new := request.arrive(delay))]
        for replica, drafter in enumerate(drafters):
            elsewhere = [pair for pair in arrived if pair[0].replica != replica and shown[replica]]
            append(drafter, [request for request, _ in elsewhere], [new for _, new in elsewhere])

    live = requests
    while live:
        before = result.tokens
        for batch in [live] if order == "engine" else [[request] for request in live]:
            for replica, drafter in enumerate(drafters):
                if own := [request for request in batch if request.replica == replica]:
                    _draft_and_verify(result, drafter, own)
            if delay is not None:
                deliver(batch, delay)
        if progress:
            progress(result.tokens - before)
        live = [request for request in live if not request.finished]
        if delay is not None:
            for request in (ended := [request for request in requests if request.finished]):
                request.rounds_since_end += 1
            deliver(ended, delay if live else 0)
    for drafter, its in zip(drafters, shown, strict=True):
        for request in its:
            drafter.finish(request.name)


def _draft_and_verify(result: Replay, drafter, batch: list[Request]) -> None:
    budgets = np.full(len(batch), result.draft_length, dtype=np.int32)
    drafts, pieces = drafter.draft([request.name for request in batch], budgets), []
    for row, request in enumerate(batch):
        part, position = slice(drafts.offsets[row], drafts.offsets[row + 1]), request.accepted
        accepted, new = request.verify(drafts.token_ids[part])
        result.count(position, drafts.acceptance[part], accepted, len(new))
        pieces.append(new)
    append(drafter, batch, pieces)


def append(drafter, requests: list[Request], pieces: list[np.ndarray]) -> float:
    """Show the drafter new tokens of requests, int32 [length] each; returns the seconds that it took."""
    if not requests:
        return 0.0
    offsets = np.cumsum([0, *map(len, pieces)], dtype=np.int64)
    names, tokens = [request.name for request in requests], np.concatenate(pieces)
    started = time.perf_counter()
    drafter.append(names, tokens, offsets)
    return time.perf_counter() - started
