"""Rejection sampling follows the target distribution; the same tests catch rules and noise that do not."""

from types import SimpleNamespace

import pytest
import torch

from sam import verify
from sam.verify import rejection
from tests.sam.verify.test_exact import SAMPLES, TARGETS, p_value

LIKELY, UNLIKELY = [0, 1], [3, 0]  # fixed drafts of two tokens; with `masked` the unlikely one is impossible


def sampling(count, generators=None):
    return SimpleNamespace(all_greedy=False, all_random=True, temperature=None, generators=generators or {})


@pytest.mark.statistical
def test_a_draft_that_is_no_token_takes_no_share_from_one():
    torch.manual_seed(0)
    count, shares = 50_000, torch.tensor([0.5, 0.3, 0.2])
    for outside in (-1, 3):
        of_drafts = torch.full((count,), outside), [1] * count, 1, torch.arange(1, count + 1), None
        logits, bonus = shares.log().expand(count, -1), torch.zeros(count, 1)
        tokens = verify.rejection_sample(*of_drafts, logits, bonus, sampling(count))[:, 0]
        assert p_value(torch.bincount(tokens, minlength=3).double(), shares.double() * count) > 1e-4


def test_a_seeded_request_has_numbers_of_its_own():
    """Whatever is beside it; and none of them decides two things."""
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))

    def tokens(requests, seed):
        generators = {0: torch.Generator().manual_seed(seed)}
        drafts, ends = torch.zeros(2 * requests, dtype=torch.int64), torch.arange(2, 2 * requests + 1, 2)
        of = sampling(requests, generators=generators)
        bonus = torch.zeros(requests, 1)
        return verify.rejection_sample(drafts, [2] * requests, 2, ends, None, logits[: 2 * requests], bonus, of)[0]

    found = [[tokens(requests, seed).tolist() for seed in range(20)] for requests in (1, 3)]
    assert found[0] == found[1] and len({tuple(one) for one in found[0]}) > 10


def verified(name: str, temperature: float, drafts: list[int], q: list[float] | None = None, favour: float = 0.0):
    """Tokens [SAMPLES, 3] of requests with two drafts, and the distributions [3, 5] of the three positions.

    Args:
        q: the distribution that the drafts are drawn from; None: they are `drafts` in every request.
        favour: added to the logits of likely tokens, as a lossy rule does.
    """
    base = torch.tensor(TARGETS[name]).log() / temperature
    rows = torch.stack([base, base.roll(1), base.roll(2)])
    probabilities = rows.softmax(-1)
    if q is None:
        drafts = torch.tensor(drafts).repeat(SAMPLES)
    else:
        drafts = torch.multinomial(torch.tensor(q), 2 * SAMPLES, replacement=True)
        q = torch.tensor(q).expand(2 * SAMPLES, 5)
    bonus = torch.multinomial(probabilities[2], SAMPLES, replacement=True)[:, None]
    logits = torch.where(rows[:2].softmax(-1) > 0.3, rows[:2] + favour, rows[:2]).repeat(SAMPLES, 1)
    ends = torch.arange(2, 2 * SAMPLES + 1, 2)
    tokens = verify.rejection_sample(drafts, [2] * SAMPLES, 2, ends, q, logits, bonus, sampling(SAMPLES))
    return tokens.to(torch.int64), probabilities


def worst_p_value(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    """The smallest of the positions; the later ones among the requests that reached them."""
    smallest = 1.0
    for position, expected in enumerate(probabilities.double()):
        reached = tokens[:, position][tokens[:, position] != verify.PLACEHOLDER]
        if len(reached) > 1000:
            smallest = min(smallest, p_value(torch.bincount(reached, minlength=5).double(), expected * len(reached)))
    return smallest


@pytest.mark.statistical
@pytest.mark.parametrize("temperature", [0.3, 1.2])
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(
    ("drafts", "q"), [(LIKELY, None), (UNLIKELY, None), ([], [0.2] * 5), ([], [0.1, 0.6, 0.1, 0.1, 0.1])]
)
def test_tokens_follow_the_target(name, temperature, drafts, q):
    torch.manual_seed(0)
    tokens, probabilities = verified(name, temperature, drafts, q)
    assert worst_p_value(tokens, probabilities) > 1e-4
    goes_on = tokens[:, 1] != verify.PLACEHOLDER
    if q is None:
        assert torch.equal(goes_on, tokens[:, 0] == drafts[0])  # on where the draft stands
    else:
        expected = torch.minimum(probabilities[0], torch.tensor(q)).sum()
        assert float(goes_on.double().mean()) == pytest.approx(float(expected), abs=0.01)


@pytest.mark.statistical
def test_the_same_test_catches_shared_noise_and_a_lossy_rule(monkeypatch):
    """A uniform that accepts or rejects a draft also decides which token is drawn in its place."""
    torch.manual_seed(0)
    assert worst_p_value(*verified("typical", 1.0, LIKELY, favour=1.0)) < 1e-12
    shared = torch.rand(2 * SAMPLES, dtype=torch.float64)
    monkeypatch.setattr(rejection, "_uniforms", lambda *_: (shared, shared[::2].clone()))
    assert worst_p_value(*verified("typical", 1.0, UNLIKELY)) < 1e-12
