"""The responses of a rollout: their lengths, drawn from a log-normal fit, or recorded with their text."""

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
        arrivals: float64 [requests], milliseconds from the round's begin, rising.
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

    @property
    def mu(self) -> float:
        """Mean of the logarithm before the cut, by bisection."""
        low, high = 0.0, math.log(self.cap) + 4 * self.sigma**2
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if self._mean(middle) < self.mean else (low, middle)
        return low

    def _mean(self, mu: float) -> float:
        """Mean of the lengths cut at the cap."""
        above = (math.log(self.cap) - mu) / self.sigma
        whole = math.exp(mu + self.sigma**2 / 2) * NORMAL.cdf(above - self.sigma)
        return whole + self.cap * (1 - NORMAL.cdf(above))

    def draw(self, prompts: int, samples: int, prompt_tokens: int = 128, seed: int = 0) -> Round:
        """Draw a round of `prompts` x `samples` requests that arrive at once.

        The part that the samples of a prompt share is stratified over the prompts, so that rounds differ less than with
        independent prompts; the rest is random.
        """
        rng = np.random.default_rng(seed)
        common = np.array([NORMAL.inv_cdf((i + 0.5) / prompts) for i in range(prompts)])
        rng.shuffle(common)
        lengths = self._lengths(common, samples, rng)
        count = prompts * samples
        numbers = np.repeat(range(prompts), samples)
        return Round(lengths, numbers, np.full(count, prompt_tokens), np.zeros(count))

    def _lengths(self, common: np.ndarray, samples: int, rng: np.random.Generator) -> np.ndarray:
        own = rng.standard_normal((len(common), samples))
        z = math.sqrt(self.correlation) * common[:, None] + math.sqrt(1 - self.correlation) * own
        return np.clip(np.rint(np.exp(self.mu + self.sigma * z)), 1, self.cap).astype(np.int64).ravel()


def recorded_round(recording: Recording, arrivals: np.ndarray | None = None) -> Round:
    """All responses of a recording as one round, prompt by prompt; empty ones are left out.

    Raises:
        ValueError: a recording without responses.
    """
    pairs = [(prompt, text) for prompt, samples in enumerate(recording.responses) for text in samples if len(text)]
    if not pairs:
        raise ValueError("the recording has no responses")
    prompts = np.array([prompt for prompt, _ in pairs])
    return Round(
        np.array([len(text) for _, text in pairs]),
        prompts,
        np.array([len(recording.prompts[prompt]) for prompt in prompts]),
        np.zeros(len(pairs)) if arrivals is None else arrivals,
        recording.prompts,
        [text for _, text in pairs],
    )
