"""The requests of a rollout: response lengths drawn from a log-normal fit, or recorded responses."""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from sam.record.responses import Recording

NORMAL = NormalDist()


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


@dataclass(frozen=True)
class LogNormal:
    """Lengths exp(mu + sigma z), cut at `cap`, with mu such that their mean is `mean`.

    Attributes:
        mean: tokens, of the lengths cut at `cap`.
        cap: tokens.
        sigma: standard deviation of the logarithm, over all responses.
        correlation: share of its variance that the samples of a prompt have in common.

    Raises:
        ValueError: no such distribution.
    """

    mean: float
    cap: int
    sigma: float
    correlation: float

    def __post_init__(self) -> None:
        if not 1 <= self.mean < self.cap:
            raise ValueError(f"lengths: mean {self.mean:g}: expected at least 1 and less than the cap {self.cap}")
        if not 0 < self.sigma <= 3 or not 0 <= self.correlation <= 1:
            raise ValueError(
                f"lengths: sigma {self.sigma:g}, correlation {self.correlation:g}: expected sigma above 0 up to 3, "
                "correlation from 0 to 1"
            )

    def draw(self, prompts: int, samples: int, prompt_tokens: int = 128, seed: int = 0) -> Round:
        """Draw a round of `prompts` x `samples` requests that arrive at once.

        The part that the samples of a prompt share is stratified over the prompts, so that rounds differ less than with
        independent prompts; the rest is random.
        """
        rng, count = np.random.default_rng(seed), prompts * samples
        common = np.array([NORMAL.inv_cdf((i + 0.5) / prompts) for i in range(prompts)])
        rng.shuffle(common)
        own = rng.standard_normal((prompts, samples))
        z = math.sqrt(self.correlation) * common[:, None] + math.sqrt(1 - self.correlation) * own
        lengths = np.clip(np.rint(np.exp(self._mu() + self.sigma * z)), 1, self.cap).astype(np.int64).ravel()
        return Round(lengths, np.repeat(range(prompts), samples), np.full(count, prompt_tokens), np.zeros(count))

    def _mu(self) -> float:
        """Return the mean of the logarithm before the cut, by bisection."""
        low, high = 0.0, math.log(self.cap) + 4 * self.sigma**2
        for _ in range(60):
            middle = (low + high) / 2
            above = (math.log(self.cap) - middle) / self.sigma
            below_cap = math.exp(middle + self.sigma**2 / 2) * NORMAL.cdf(above - self.sigma)
            is_low = below_cap + self.cap * (1 - NORMAL.cdf(above)) < self.mean
            low, high = (middle, high) if is_low else (low, middle)
        return low


def recorded_round(recording: Recording, arrivals: np.ndarray | None = None) -> Round:
    """Make a round of all responses of a recording, prompt by prompt; empty ones are left out."""
    pairs = [(prompt, text) for prompt, samples in enumerate(recording.responses) for text in samples if len(text)]
    lengths, prompts = np.array([len(text) for _, text in pairs]), np.array([prompt for prompt, _ in pairs])
    prompt_tokens = np.array([len(recording.prompts[prompt]) for prompt in prompts])
    arrivals = np.zeros(len(pairs)) if arrivals is None else arrivals
    return Round(lengths, prompts, prompt_tokens, arrivals, recording.prompts, [text for _, text in pairs])
