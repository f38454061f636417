"""Loads: requests that start together, and the prompts and seeds that each round gives them."""

from typing import Any

SEEDS_OF_A_LOAD = 1 << 20
WARM_UP = 0  # the round that is not counted


def group_sizes(requests: int, samples: int) -> list[int]:
    """Requests of each prompt: `samples` of every one, fewer of the last where it does not come out even.

    Example:
        >>> group_sizes(24, 8), group_sizes(4, 8), group_sizes(12, 8)
        ([8, 8, 8], [4], [8, 4])
    """
    sizes = [samples] * (requests // samples)
    return sizes + ([requests % samples] if requests % samples else [])


def check_prompts(loads: list[int], samples: int, available: int, source: str) -> None:
    """Raise ValueError if a load needs more prompts than there are: the same prompt twice would be a larger group."""
    needed = len(group_sizes(max(loads), samples))
    if needed > available:
        raise ValueError(
            f"{source}: {available} prompts, {max(loads)} requests of {samples} samples each need {needed}: "
            "give more prompts, more --samples or fewer --requests"
        )


def requests_of(
    loads: list[int], number: int, round_: int, samples: int, prompts: list[list[int]], seeds: bool
) -> list[dict[str, Any]]:
    """The requests of load `number` in a round.

    Every round and load has other prompts, while they last, and other seeds, so that no drafter meets a response that
    it has seen before. All variants get the same.

    Args:
        loads: requests of each load.
        round_: from 0, which is the warm-up.
        samples: requests of one prompt.
        prompts: token ids.
        seeds: whether requests carry seeds.

    Returns:
        `prompt_token_ids` and `seed` (None without seeds) of each request.
    """
    groups = [group_sizes(load, samples) for load in loads]
    first = round_ * sum(map(len, groups)) + sum(map(len, groups[:number]))
    rows = [prompts[(first + group) % len(prompts)] for group, size in enumerate(groups[number]) for _ in range(size)]
    seed = (round_ * len(loads) + number) * SEEDS_OF_A_LOAD
    return [{"prompt_token_ids": row, "seed": seed + i if seeds else None} for i, row in enumerate(rows)]
