"""Keyed uniforms, inverse-CDF sampling and exact-match verification."""

import numpy as np
import pytest
import torch
from scipy import stats

from sam import verify
from sam.verify import exact
from sam.verify.exact import rng_key, uniforms

VOCABULARY = 151_936


@pytest.fixture(params=[1 << 30, 0], ids=["host", "device"])
def search(request, monkeypatch):
    monkeypatch.setattr(exact, "SMALL_VOCABULARY", request.param)


def test_uniforms_are_uniform_independent_and_the_same_on_every_machine():
    many = np.arange(200_000)
    by_key, by_position = uniforms(many, np.zeros_like(many)), uniforms(np.full_like(many, 3), many)
    for values in (by_key, by_position):
        assert 0 < values.min() and values.max() < 1
        assert stats.kstest(values, "uniform").pvalue > 1e-3
    others = [uniforms(np.full_like(many, 3), many, stream=1), uniforms(np.full_like(many, 4), many)]
    for x, y in ((by_position[:-1], by_position[1:]), *((by_position, other) for other in others)):
        assert abs(np.corrcoef(x, y)[0, 1]) < 4 / np.sqrt(len(x))
    assert uniforms(np.array([1, 2]), np.array([0, 5])).tolist() == [0.3681895156516696, 0.8160564352416809]
    keys = {rng_key(*one) for one in ((7, 0, "a"), (7, 1, "b"), (None, 0, "a"), (None, 0, "b"), (None, 1, "a"))}
    assert len(keys) == 4 and all(0 <= key < 2**63 for key in keys)


def distributions() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    peaked = torch.randn(VOCABULARY, generator=generator)
    peaked[100] = 28.0  # the others share about 1e-7 of the mass
    return {
        "flat": torch.zeros(VOCABULARY),
        "language-like": 3 * torch.randn(VOCABULARY, generator=generator),
        "near-deterministic": peaked,
    }


def share(sample, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Measure of the uniforms that draw each token, by bisection of both ends (draws grow with the uniform)."""
    goals = torch.cat((tokens, tokens + 1))
    low, high = torch.zeros(len(goals), dtype=torch.float64), torch.ones(len(goals), dtype=torch.float64)
    for _ in range(54):
        middle = (low + high) / 2
        reached = sample(logits.expand(len(goals), -1), middle) >= goals
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    return high[len(tokens) :] - high[: len(tokens)]


def worst_share_error(sample, logits: torch.Tensor) -> float:
    """Largest relative error of a token's share, beyond what a float64 uniform can resolve."""
    probabilities = logits.double().softmax(-1)
    order = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(1))
    tokens = order[probabilities[order] > 1e-12][:12]
    tokens = torch.cat((tokens, probabilities.topk(2).indices)).clamp(max=VOCABULARY - 2)
    expected = probabilities[tokens]
    return float((((share(sample, logits, tokens) - expected).abs() - 4e-16).clamp(min=0) / expected).max())


@pytest.mark.statistical
@pytest.mark.parametrize("name", distributions())
def test_every_token_keeps_its_share_at_a_vocabulary_of_151936(name, search):
    """The obvious way, one cumulative sum in float32, is caught."""

    def one_float32_sum(logits, draws):
        cumulative = logits.softmax(-1, dtype=torch.float32).cumsum(-1)
        targets = draws.to(torch.float32)[:, None] * cumulative[:, -1:]
        return torch.searchsorted(cumulative, targets, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)

    assert worst_share_error(verify.sample_inverse_cdf, distributions()[name]) < 1e-5
    assert worst_share_error(one_float32_sum, distributions()[name]) > 1e-3


@pytest.mark.parametrize("vocabulary", [exact.BLOCK * 3, exact.BLOCK * 3 + 1, exact.BLOCK * 4 - 1, 5])
def test_tokens_are_those_of_float64(vocabulary, search):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 4 * torch.randn(2000, vocabulary, generator=generator)
    draws = torch.rand(2000, dtype=torch.float64, generator=generator)
    found = verify.sample_inverse_cdf(logits, draws)
    cumulative = logits.double().softmax(-1).cumsum(-1)
    float64 = torch.searchsorted(cumulative, draws[:, None] * cumulative[:, -1:], right=True).squeeze(1)
    assert (found != float64).sum() <= 1


def test_masked_tokens_are_never_drawn(search):
    vocabulary = 2 * exact.BLOCK + 7
    generator = torch.Generator().manual_seed(2)
    ends = torch.tensor([2.0**-53, 1 - 2.0**-53, 0.5, 2.0**-30, 1 - 2.0**-30], dtype=torch.float64)
    for _ in range(200):
        logits = torch.randn(len(ends), vocabulary, generator=generator)
        mask = torch.rand(vocabulary, generator=generator) < 0.98
        mask[torch.randint(vocabulary, (1,), generator=generator)] = False
        logits[:, mask] = -torch.inf
        assert not mask[verify.sample_inverse_cdf(logits, ends)].any()
    alone = torch.full((vocabulary, vocabulary), -torch.inf).fill_diagonal_(0.0)
    for end in ends:
        assert torch.equal(verify.sample_inverse_cdf(alone, end.expand(vocabulary)), torch.arange(vocabulary))


def test_rows_without_mass_give_token_0(search):
    logits = torch.zeros(5, 1500)
    logits[1, 3] = torch.nan
    logits[2] = -torch.inf
    logits[3, 7] = torch.inf
    draws = torch.full((5,), 0.75, dtype=torch.float64)
    tokens = verify.sample_inverse_cdf(logits, draws)
    assert tokens[1:4].tolist() == [0, 0, 0] and tokens[0] == tokens[4] and abs(int(tokens[0]) - 1125) <= 1


TARGETS = {
    "typical": [0.5, 0.2, 0.1, 0.1, 0.1],
    "flat": [0.2] * 5,
    "near-deterministic": [0.996, 0.001, 0.001, 0.001, 0.001],
    "masked": [0.6, 0.0, 0.3, 0.0, 0.1],
}
SAMPLES = 200_000


def target_rows(name: str, temperature: float) -> torch.Tensor:
    """Logits of three successive positions, each of which depends on the token before it: [3, 5, 5]."""
    base = torch.tensor(TARGETS[name]).log() / temperature
    return torch.stack([torch.stack([base.roll(shift * position) for shift in range(5)]) for position in (0, 1, 2)])


def decode(rows: torch.Tensor, draft: list[int], draws: torch.Tensor) -> torch.Tensor:
    """Verify the draft of two tokens in SAMPLES requests, then decode what is missing: the first three tokens.

    draws: [SAMPLES, 3], one uniform per position, as drafting or not.
    """
    previous = torch.tensor([0, *draft])
    logits = rows[torch.arange(3), previous].expand(len(draws), 3, 5).reshape(-1, 5)
    sampled = verify.sample_inverse_cdf(logits, draws.reshape(-1)).view(-1, 3)
    drafts = torch.tensor([*draft, -2]).expand(len(draws), 3)
    tokens = verify.accept_matching(sampled, drafts).to(torch.int64)
    for position in (1, 2):
        missing = tokens[:, position] == verify.PLACEHOLDER
        plain = verify.sample_inverse_cdf(rows[position, tokens[:, position - 1]], draws[:, position])
        tokens[:, position] = torch.where(missing, plain, tokens[:, position])
    return tokens


def p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Chi-square, rare values taken together; 0 if an impossible one is among them."""
    if counts[expected == 0].sum():
        return 0.0
    often = expected >= 5
    counts = torch.cat((counts[often], counts[~often].sum()[None]))
    expected = torch.cat((expected[often], expected[~often].sum()[None]))
    possible = expected > 1e-6
    if possible.sum() < 2:
        return 1.0
    return float(stats.chisquare(counts[possible].numpy(), expected[possible].numpy(), sum_check=False).pvalue)


@pytest.mark.statistical
@pytest.mark.parametrize("temperature", [0.3, 1.2])
@pytest.mark.parametrize("name", TARGETS)
def test_first_second_and_third_token_follow_the_target(name, temperature):
    rows = target_rows(name, temperature)
    p = rows.double().softmax(-1)
    joint = p[0, 0][:, None, None] * p[1][:, :, None] * p[2][None]
    keys, positions = np.repeat(np.arange(SAMPLES), 3), np.tile(np.arange(3), SAMPLES)
    for stream, draft in enumerate([[0, 0], [1, 2], [4, 4], [2, 0]]):
        tokens = decode(rows, draft, torch.from_numpy(uniforms(keys, positions, stream)).view(-1, 3))
        counts = torch.bincount(tokens @ torch.tensor([25, 5, 1]), minlength=125).double()
        assert p_value(counts, joint.reshape(-1) * SAMPLES) > 1e-4
