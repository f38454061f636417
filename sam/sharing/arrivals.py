"""Text of requests elsewhere as a drafter takes it: one stretch of each, without what is known of it."""

from typing import NamedTuple

import numpy as np

from sam.sharing.messages import Reply, offsets_of


class Arrivals(NamedTuple):
    """Text of requests elsewhere, at most one stretch of each.

    Attributes:
        new: number and group of the requests that appear for the first time.
        numbers: int64 [pieces], the requests; a number may be used again when its group has been forgotten.
        positions: int64 [pieces], place of a piece's first token in its response.
        offsets: int64 [pieces + 1], where each piece's tokens begin, and the total.
        tokens: int32 [total].
        asked: seconds by the client's clock when it asked for them.
    """

    new: list[tuple[int, bytes]]
    numbers: np.ndarray
    positions: np.ndarray
    offsets: np.ndarray
    tokens: np.ndarray
    asked: float = 0.0


def merge(numbers: np.ndarray, reply: Reply, lengths: np.ndarray) -> tuple[Arrivals, np.ndarray]:
    """One stretch for each request, without what is known of it.

    Args:
        numbers: int64 [pieces], the requests of the reply's pieces; negative ones are left out.
        lengths: int64, known of each request.

    Returns:
        The stretches by rising number, and the indices of pieces that begin after what is known.
    """
    counts = np.diff(reply.offsets)
    order = np.argsort(numbers, kind="stable")
    order = order[numbers[order] >= 0]
    number, position, count = numbers[order], reply.positions[order].astype(np.int64), counts[order]
    # Within a log a request's pieces follow each other, so what is known before a piece is the end of the one before.
    is_first = np.diff(number, prepend=-1) != 0
    ends = position + count
    expected = np.where(is_first, lengths[number], np.roll(ends, 1))
    expected = np.maximum(expected, lengths[number])
    missing = np.isin(number, number[position > expected])
    skipped = np.clip(expected - position, 0, count)
    skipped[missing] = count[missing]
    kept = count - skipped
    starts = reply.offsets[:-1][order] + skipped
    begins = offsets_of(kept)
    places = np.arange(begins[-1]) + np.repeat(starts - begins[:-1], kept)
    used = np.flatnonzero(kept)
    firsts = used[np.diff(number[used], prepend=-1) != 0]
    bounds = np.append(begins[firsts], begins[-1])
    stretches = Arrivals([], number[firsts], position[firsts] + skipped[firsts], bounds, reply.tokens[places])
    return stretches, order[missing]


def split(arrivals: Arrivals, max_tokens: int) -> list[Arrivals]:
    """Parts of at most `max_tokens` each, in which a stretch may be cut."""
    if arrivals.offsets[-1] <= max_tokens:
        return [arrivals]
    total = int(arrivals.offsets[-1])
    parts = [_between(arrivals, begin, min(total, begin + max_tokens)) for begin in range(0, total, max_tokens)]
    parts[0] = parts[0]._replace(new=arrivals.new)
    return parts


def _between(arrivals: Arrivals, begin: int, end: int) -> Arrivals:
    inside = np.flatnonzero((arrivals.offsets[:-1] < end) & (arrivals.offsets[1:] > begin))
    starts = np.maximum(arrivals.offsets[inside], begin)
    positions = arrivals.positions[inside] + starts - arrivals.offsets[inside]
    offsets = np.append(starts - begin, end - begin)
    tokens = arrivals.tokens[begin:end]
    return Arrivals([], arrivals.numbers[inside], positions, offsets, tokens, arrivals.asked)
