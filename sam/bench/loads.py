"""Loads: requests that start together, in batches one after another, and their prompts and seeds in each round."""

import itertools
from typing import Any

import numpy as np

from sam.bench.prompts import Group
from sam.bench.settings import Settings

SEEDS_OF_A_LOAD = 1 << 20
WARM_UP = 0  # the round that is not counted, one batch of each load


def group_sizes(requests: int, samples: int) -> list[int]:
    """Requests of each prompt: `samples` of every one, fewer of the last where it does not come out even.

    Example:
        >>> group_sizes(24, 8), group_sizes(4, 8), group_sizes(12, 8)
        ([8, 8, 8], [4], [8, 4])
    """
    sizes = [samples] * (requests // samples)
    return sizes + ([requests % samples] if requests % samples else [])


def batch_count(requests: int, responses: int) -> int:
    """Batches of a counted round: as many as give at least `responses` responses.

    Example:
        >>> [batch_count(requests, responses=8) for requests in (1, 3, 4, 24)]
        [8, 3, 2, 1]
    """
    return -(-responses // requests)


def groups_before(settings: Settings, round_: int, number: int = 0) -> int:
    """Groups taken before load `number` of a round; before round n + 1 all that n rounds and the warm-up need."""
    loads = settings.requests
    of_batch = [len(group_sizes(load, settings.samples)) for load in loads]
    if round_ == WARM_UP:
        return sum(of_batch[:number])
    of_round = [count * batch_count(load, settings.responses) for count, load in zip(of_batch, loads, strict=True)]
    return sum(of_batch) + (round_ - 1) * sum(of_round) + sum(of_round[:number])


def batches_of(settings: Settings, round_: int, number: int, groups: list[Group]) -> list[list[dict[str, Any]]]:
    """The requests of load `number` in a round, by batch; a batch starts when the one before has ended.

    Every batch, round and load has other groups and other seeds, so that no drafter meets a response that it has seen
    before; a recording's groups that come again do so `in_other_tokens`. All variants get the same.

    Returns:
        `prompt_token_ids`, `seed` (None without seeds) and `response` (to be forced, or None) of each request.
    """
    load, place = settings.requests[number], groups_before(settings, round_, number)
    seeds = itertools.count((round_ * len(settings.requests) + number) * SEEDS_OF_A_LOAD)
    batches: list[list[dict[str, Any]]] = []
    for _ in range(1 if round_ == WARM_UP else batch_count(load, settings.responses)):
        batches.append([])
        for size in group_sizes(load, settings.samples):
            prompt, responses = in_other_tokens(groups, place, size)
            place += 1
            for response in (responses or [None] * size)[:size]:
                seed = next(seeds) if settings.seeds else None
                batches[-1].append({"prompt_token_ids": prompt, "seed": seed, "response": response})
    return batches


def in_other_tokens(groups: list[Group], place: int, size: int) -> Group:
    """The group that is `place`-th to come. When all have come they come again, in other tokens: with each token of the
    recording put in another one's place, all over it, text repeats itself as it did and is new to every drafter.

    Args:
        size: requests of the group; responses that have not been taken yet come first.
    """
    times, number = divmod(place, len(groups))
    group = groups[number]
    if not times or group.responses is None:
        return group
    known = np.unique(np.concatenate([text for one in groups for text in (one.prompt, *one.responses)]))
    other = np.random.default_rng(times).permutation(known)
    prompt, *responses = (other[np.searchsorted(known, text)].tolist() for text in (group.prompt, *group.responses))
    first = times * size % len(responses)
    return Group(prompt, responses[first:] + responses[:first])
