"""Loads: requests that start together, in batches one after another, and their prompts and seeds in each round."""

from typing import Any, NamedTuple

from sam.bench.settings import Settings

SEEDS_OF_A_LOAD = 1 << 20
WARM_UP = 0  # the round that is not counted, one batch of each load


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


def batch_count(requests: int, responses: int) -> int:
    """Batches of a counted round: as many as give at least `responses` responses.

    Example:
        >>> [batch_count(requests, responses=8) for requests in (1, 3, 4, 24)]
        [8, 3, 2, 1]
    """
    return -(-responses // requests)


def groups_before(loads: list[int], samples: int, responses: int, round_: int, number: int = 0) -> int:
    """Groups taken before load `number` of a round; before round n + 1 all that n rounds and the warm-up need.

    Example:
        >>> [groups_before([1, 4, 24], samples=8, responses=8, round_=round_) for round_ in (0, 1, 2)]
        [0, 5, 18]
    """
    of_batch = [len(group_sizes(load, samples)) for load in loads]
    if round_ == WARM_UP:
        return sum(of_batch[:number])
    of_round = [groups * batch_count(load, responses) for groups, load in zip(of_batch, loads, strict=True)]
    return sum(of_batch) + (round_ - 1) * sum(of_round) + sum(of_round[:number])


def come_again(settings: Settings, number: int, round_: int, groups: list[Group]) -> bool:
    """Whether load `number` of a round takes groups that a batch before it has had, since there are no others left."""
    return groups_before(settings.requests, settings.samples, settings.responses, round_, number + 1) > len(groups)


def check_prompts(loads: list[int], samples: int, available: int, source: str) -> None:
    """Raise ValueError if a batch needs more prompts than there are: the same prompt twice would be a larger group."""
    needed = len(group_sizes(max(loads), samples))
    if needed > available:
        raise ValueError(
            f"{source}: {available} prompts, {max(loads)} requests of {samples} samples each need {needed}: "
            "give more prompts, more --samples or fewer --requests"
        )


def batches_of(settings: Settings, number: int, round_: int, groups: list[Group]) -> list[list[dict[str, Any]]]:
    """The requests of load `number` in a round, by batch; a batch starts when the one before has ended.

    Every batch, round and load has other groups, while they last, and other seeds, so that no drafter meets a response
    that it has seen before; when they have run out drafters are told to forget (`come_again`). All variants get the
    same.

    Args:
        round_: from 0, which is the warm-up, where one batch is enough.

    Returns:
        `prompt_token_ids`, `seed` (None without seeds) and `response` (to be forced, or None) of each request.
    """
    loads, samples, responses = settings.requests, settings.samples, settings.responses
    load, sizes = loads[number], group_sizes(loads[number], samples)
    first = groups_before(loads, samples, responses, round_, number)
    seed = (round_ * len(loads) + number) * SEEDS_OF_A_LOAD
    batches = []
    for batch in range(1 if round_ == WARM_UP else batch_count(load, responses)):
        places = range(first + batch * len(sizes), first + (batch + 1) * len(sizes))
        its = [
            _again(groups[place % len(groups)], place // len(groups), size)
            for place, size in zip(places, sizes, strict=True)
        ]
        batches.append(requests_of(its, sizes, seed + batch * load if settings.seeds else None))
    return batches


def _again(group: Group, times: int, size: int) -> Group:
    """A group that has come before: its responses begin with those that a batch has not given yet."""
    if group.responses is None or not times:
        return group
    first = times * size % len(group.responses)
    return group._replace(responses=group.responses[first:] + group.responses[:first])


def requests_of(groups: list[Group], sizes: list[int], seed: int | None) -> list[dict[str, Any]]:
    """Requests of a batch, `sizes` of each group, with seeds from `seed` on."""
    requests = []
    for (prompt, responses), size in zip(groups, sizes, strict=True):
        for response in responses[:size] if responses else [None] * size:
            own = None if seed is None else seed + len(requests)
            requests.append({"prompt_token_ids": prompt, "seed": own, "response": response})
    return requests
