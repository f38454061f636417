"""Loads: requests that start together, and the prompts and seeds that each round gives them."""

from typing import Any, NamedTuple

SEEDS_OF_A_LOAD = 1 << 20
WARM_UP = 0  # the round that is not counted


class Group(NamedTuple):
    """A prompt and, where the text is forced, the responses that its requests emit, as token ids."""

    prompt: list[int]
    responses: list[list[int]] | None = None

    def longest_text(self, max_tokens: int) -> int:
        """Tokens of the prompt and its longest response."""
        return len(self.prompt) + (max_tokens if self.responses is None else max(map(len, self.responses)))


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
    loads: list[int], number: int, round_: int, samples: int, groups: list[Group], seeds: bool
) -> list[dict[str, Any]]:
    """The requests of load `number` in a round.

    Every round and load has other groups, while they last, and other seeds, so that no drafter meets a response that
    it has seen before. All variants get the same.

    Args:
        loads: requests of each load.
        round_: from 0, which is the warm-up.
        samples: requests of one prompt.
        seeds: whether requests carry seeds.

    Returns:
        `prompt_token_ids`, `seed` (None without seeds) and `response` (to be forced, or None) of each request.
    """
    sizes = [group_sizes(load, samples) for load in loads]
    first = round_ * sum(map(len, sizes)) + sum(map(len, sizes[:number]))
    seed = (round_ * len(loads) + number) * SEEDS_OF_A_LOAD
    requests = []
    for group, size in enumerate(sizes[number]):
        prompt, responses = groups[(first + group) % len(groups)]
        for response in responses[:size] if responses else [None] * size:
            own = seed + len(requests) if seeds else None
            requests.append({"prompt_token_ids": prompt, "seed": own, "response": response})
    return requests
