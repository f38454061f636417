"""The requests of a rollout: response lengths drawn from a log-normal fit, or recorded responses."""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from sam.record.responses import Recording

NORMAL = NormalDist()
PROMPT_TOKENS = 128  # of a drawn request


@dataclass(frozen=True)
class Round:
    """A generation round: requests in the order in which they queue.

    Attributes:
        lengths: int64 [requests], response tokens, at least 1.
        prompts: int64 [requests], number of each one's prompt, from 0.
        prompt_tokens: int64 [requests].
        arrivals: float64 [requests], milliseconds from the round's begin.
        prompt_texts: int32 arrays by prompt; responses: int32 arrays by request; both only of recorded rounds.
    """

    lengths: np.ndarray
    prompts: np.ndarray
    prompt_tokens: np.ndarray
    arrivals: np.ndarray
    prompt_texts: list[np.ndarray] | None = None
    responses: list[np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """Tokens of all responses."""
        return int(self.lengths.sum())


def log_normal(
    mean: float, cap: float, sigma: float, correlation: float, shape: tuple[int, int], seed: int = 0
) -> Round:
    """Draw a round of `shape` (prompts, samples) requests that arrive at once, of lengths exp(mu + sigma z).

    The part of z that the samples of a prompt share is stratified over the prompts, so that rounds differ less than
    with independent prompts; the rest is random.

    Args:
        mean: tokens, of the lengths cut at `cap` tokens; mu follows from it.
        sigma: standard deviation of the logarithm, over all responses.
        correlation: share of its variance that the samples of a prompt have in common.

    Raises:
        ValueError: no such distribution.
    """
    cap = int(cap)
    if not 1 <= mean < cap:
        raise ValueError(f"lengths: mean {mean:g}: expected at least 1 and less than the cap {cap}")
    if not 0 < sigma <= 3 or not 0 <= correlation <= 1:
        raise ValueError(
            f"lengths: sigma {sigma:g}, correlation {correlation:g}: expected sigma above 0 up to 3, correlation from "
            "0 to 1"
        )
    low, high = 0.0, math.log(cap) + 4 * sigma**2  # of mu, by bisection
    for _ in range(60):
        mu = (low + high) / 2
        above = (math.log(cap) - mu) / sigma
        cut_mean = math.exp(mu + sigma**2 / 2) * NORMAL.cdf(above - sigma) + cap * (1 - NORMAL.cdf(above))
        low, high = (mu, high) if cut_mean < mean else (low, mu)
    rng, (prompts, samples) = np.random.default_rng(seed), shape
    common = np.array([NORMAL.inv_cdf((i + 0.5) / prompts) for i in range(prompts)])
    rng.shuffle(common)
    z = math.sqrt(correlation) * common[:, None] + math.sqrt(1 - correlation) * rng.standard_normal(shape)
    lengths = np.clip(np.rint(np.exp(low + sigma * z)), 1, cap).astype(np.int64).ravel()
    count = len(lengths)
    return Round(lengths, np.repeat(range(prompts), samples), np.full(count, PROMPT_TOKENS), np.zeros(count))


def recorded_round(recording: Recording, arrivals: np.ndarray | None = None) -> Round:
    """Make a round of all responses of a recording, prompt by prompt; empty ones are left out."""
    pairs = [(prompt, text) for prompt, samples in enumerate(recording.responses) for text in samples if len(text)]
    lengths, prompts = np.array([len(text) for _, text in pairs]), np.array([prompt for prompt, _ in pairs])
    prompt_tokens = np.array([len(recording.prompts[prompt]) for prompt in prompts])
    arrivals = np.zeros(len(pairs)) if arrivals is None else arrivals
    return Round(lengths, prompts, prompt_tokens, arrivals, recording.prompts, [text for _, text in pairs])
