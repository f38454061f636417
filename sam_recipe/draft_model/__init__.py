"""Trained drafters for a target, from the target's own responses."""

from dataclasses import dataclass

WIDTH = 128  # the tiny model's; Adam's rate falls as 1 / width (Yang et al., Tensor Programs V, arXiv:2203.03466)


@dataclass(frozen=True)
class Settings:
    """How a trained drafter is made."""

    prompts: int = 96  # answered, each `samples` times; the responses to the last tenth of them are held out
    samples: int = 4
    response_tokens: int = 256  # of a response at most
    steps: int = 300  # of the optimizer, each on `sequences` responses
    sequences: int = 12
    learning_rate: float = 2e-3  # peak for states of up to WIDTH numbers, less for wider ones in proportion
    threads: int = 2  # of the CPU; results repeat exactly for a given count
    seed: int = 0
    layers: int = 1  # of a draft model, from 1 to the target's
    unroll: int = 5  # passes of a draft that a head is trained on, each on the output of the one before
