"""What a variant is, and what a rollout of it took."""

from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Variant:
    """Who routes, and which engines generate.

    Attributes:
        router: verl, context, history: the same policy with each prompt's mean in an earlier epoch known beforehand,
            or oracle: with every length known beforehand.
        engines: off, sam, or shared: sam with speculation.sharing=replicas.
        chunk_tokens: as in the `routing` section.
        replicas: of all that there are, the first so many generate; None: all.
    """

    name: str
    router: str
    engines: str = "off"
    chunk_tokens: int | None = None
    replicas: int | None = None


@dataclass
class Rollout:
    """What a rollout took.

    Attributes:
        seconds: from when the requests are given to the last one's end.
        tail_seconds: from when fewer than half of the slots are busy, for good, to the end.
        start_to_end_seconds: from the last request's first token to the end.
        idle_share: of the slots' seconds in which no request ran.
        as_drawn: responses that have the length that was drawn; others ended before, by the same token.
        responses: token ids, by request.
        spans: request, replica, seconds of its first and last token there since the requests were given, of each chunk.
        status: the router's own counts at the end; empty with verl's.
    """

    seconds: float
    tail_seconds: float
    start_to_end_seconds: float
    idle_share: float
    as_drawn: int
    responses: list[list[int]] = field(repr=False)
    spans: list[tuple[int, int, float, float]] = field(repr=False)
    status: dict[str, Any] = field(default_factory=dict)

    def numbers(self) -> dict[str, Any]:
        """For JSON: all but the responses and spans."""
        return {key: value for key, value in asdict(self).items() if key not in ("responses", "spans")}


def half_empty_from(spans: list[tuple[int, int, float, float]], slots: int) -> float:
    """Seconds from which on fewer than half of the slots are busy, until the end.

    Example:
        >>> half_empty_from([(0, 0, 0.0, 3.0), (1, 0, 0.0, 5.0), (2, 1, 1.0, 9.0)], slots=4)
        5.0
    """
    ends = np.sort([end for *_, end in spans])
    starts = np.sort([start for _, _, start, _ in spans])
    for end in ends[::-1]:
        # Busy just before this end.
        if np.searchsorted(starts, end, side="left") - np.searchsorted(ends, end, side="left") >= slots / 2:
            return float(end)
    return 0.0
