"""The requests of a round: prompts of the tiny model's data, and lengths that are drawn or recorded."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from recipe.seeds import sample_seed
from sam.record.responses import Recording, read_recordings
from sam.simulate.lengths import LogNormal
from sam.simulate.routing import prompt_means

Lengths = tuple[list[int], list[int] | None]
"""Of a round's samples, prompt by prompt: their tokens, and the geometric mean of the prompt's in an earlier epoch."""


@dataclass(frozen=True)
class Work:
    """The requests of a round: prompt, seed and length of each, in the order in which they are given.

    Attributes:
        expected: of each, the mean of its prompt's lengths in an earlier epoch; None where no such epoch is known.
    """

    prompts: list[list[int]]
    seeds: list[int]
    lengths: list[int]
    expected: list[int] | None = None


def lengths_of(options: argparse.Namespace) -> Callable[[int], Lengths]:
    """Gives a round's lengths from its number.

    Raises:
        ValueError: options from which no lengths can be drawn, or a recording with too few responses.
    """
    if options.lengths is None:
        drawn = LogNormal(options.mean, options.cap, options.sigma, options.correlation)
        return partial(drawn_lengths, drawn, options.groups, options.samples)
    recording = read_recordings(options.lengths)
    sizes = options.groups, options.samples, options.cap
    recorded_lengths(recording, *sizes, 0)
    return lambda round_: (recorded_lengths(recording, *sizes, round_), None)


def drawn_lengths(lengths: LogNormal, groups: int, samples: int, round_: int) -> Lengths:
    """Those of a round that is drawn, with the means that a history of one epoch would have of its prompts."""
    drawn = lengths.draw(groups, samples, seed=round_)
    return drawn.lengths.tolist(), prompt_means(drawn.prompts, drawn.earlier).round().astype(int).tolist()


def recorded_lengths(recording: Recording, groups: int, samples: int, cap: int, round_: int) -> list[int]:
    """Tokens of `samples` recorded responses of each of `groups` prompts, times one factor for all.

    With that factor the longest of the recording has `cap` tokens. Rounds take the prompts in turn, from the first
    again after the last.

    Raises:
        ValueError: fewer than `groups` prompts have `samples` responses.
    """
    found = [[len(text) for text in texts if len(text)][:samples] for texts in recording.responses]
    found = [lengths for lengths in found if len(lengths) == samples]
    if len(found) < groups:
        raise ValueError(
            f"--lengths: {len(found)} prompts with {samples} responses or more: expected the {groups} of --groups; "
            "set --groups and --samples to what was recorded"
        )
    longest = max(map(max, found))
    chosen = [found[(round_ * groups + number) % len(found)] for number in range(groups)]
    return [max(1, round(length * cap / longest)) for lengths in chosen for length in lengths]


def make_work(options: argparse.Namespace, prompts: list[list[int]], lengths: Lengths, first_prompt: int) -> Work:
    """Requests for `groups` prompts from number `first_prompt` on, those of a prompt one after the other, as verl gives
    them; prompts begin again after the last."""
    numbers = range(first_prompt, first_prompt + options.groups)
    chosen = [prompts[number % len(prompts)] for number in numbers]
    seeds = [sample_seed(0, "train", 0, number, sample) for number in numbers for sample in range(options.samples)]
    return Work([prompt for prompt in chosen for _ in range(options.samples)], seeds, *lengths)
