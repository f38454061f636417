"""Rejection sampling follows the target distribution, and the same test catches rules and noise that do not."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scipy import stats

from sam import verify
from tests.sam.verify.originals import load_original

CACHE = Path(__file__).parents[3] / ".cache" / "peers"
SAMPLES = 200_000
TARGETS = {
    "typical": [0.5, 0.2, 0.1, 0.1, 0.1],
    "flat": [0.2] * 5,
    "near-deterministic": [0.996, 0.001, 0.001, 0.001, 0.001],
    "masked": [0.6, 0.0, 0.3, 0.0, 0.1],
}
LIKELY, UNLIKELY = [0, 1], [3, 0]  # fixed drafts of two tokens; with `masked` the unlikely one is impossible

pytestmark = pytest.mark.statistical


def verified(
    name: str, temperature: float, drafts: list[int], q: list[float] | None = None, rule=verify.rejection_sample
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [SAMPLES, 3] of requests with two drafts, and the distributions [3, 5] of the three positions.

    q: the distribution that the drafts are drawn from; None: they are `drafts` in every request.
    """
    base = torch.tensor(TARGETS[name]).log() / temperature
    rows = torch.stack([base, base.roll(1), base.roll(2)])
    probabilities = rows.softmax(-1)
    if q is None:
        drafts = torch.tensor(drafts).repeat(SAMPLES)
    else:
        drafts = torch.multinomial(torch.tensor(q), 2 * SAMPLES, replacement=True)
        q = torch.tensor(q).expand(2 * SAMPLES, 5)
    counts = [2] * SAMPLES
    tokens = rule(
        drafts,
        counts,
        2,
        torch.arange(2, 2 * SAMPLES + 1, 2),
        q,
        rows[:2].repeat(SAMPLES, 1),
        torch.multinomial(probabilities[2], SAMPLES, replacement=True)[:, None],
        SimpleNamespace(all_greedy=False, all_random=True, temperature=torch.ones(SAMPLES), generators={}),
    )
    return tokens.to(torch.int64), probabilities


def worst_p_value(tokens: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Smallest chi-square p-value of the positions; the later ones among the requests that reached them."""
    smallest = 1.0
    for position, expected in enumerate(probabilities.double().numpy()):
        reached = tokens[:, position][tokens[:, position] != verify.PLACEHOLDER]
        if len(reached) > 1000:
            counts = torch.bincount(reached, minlength=5).double().numpy()
            possible = expected > 0
            assert not counts[~possible].any()
            test = stats.chisquare(counts[possible], expected[possible] * len(reached), sum_check=False)
            smallest = min(smallest, float(test.pvalue))
    return smallest


@pytest.mark.parametrize("temperature", [0.3, 1.2])
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("drafts", [LIKELY, UNLIKELY])
def test_tokens_follow_the_target(name, temperature, drafts):
    torch.manual_seed(0)
    tokens, probabilities = verified(name, temperature, drafts)
    assert worst_p_value(tokens, probabilities) > 1e-4
    assert torch.equal(tokens[:, 1] != verify.PLACEHOLDER, tokens[:, 0] == drafts[0])  # on where the draft stands


@pytest.mark.parametrize("q", [[0.2] * 5, [0.1, 0.6, 0.1, 0.1, 0.1]])
@pytest.mark.parametrize("temperature", [0.3, 1.2])
@pytest.mark.parametrize("name", TARGETS)
def test_tokens_follow_the_target_with_drafts_of_probabilities(name, temperature, q):
    torch.manual_seed(0)
    tokens, probabilities = verified(name, temperature, [], q)
    assert worst_p_value(tokens, probabilities) > 1e-4
    accepted = (tokens[:, 1] != verify.PLACEHOLDER).double().mean()
    assert float(accepted) == pytest.approx(float(torch.minimum(probabilities[0], torch.tensor(q)).sum()), abs=0.01)


def test_the_same_test_catches_shared_noise(monkeypatch):
    """A uniform that accepts or rejects a draft also decides which token is recovered."""
    torch.manual_seed(0)
    shared = torch.rand(2 * SAMPLES, dtype=torch.float64)

    def noise_from_uniforms(num_draft_tokens, vocabulary, *_):
        noise = torch.empty(len(num_draft_tokens), vocabulary).exponential_()
        noise[:, 2] = -(1 - shared.view(-1, 2)[:, 0]).log()  # exponential, but not independent
        return noise

    monkeypatch.setattr(torch, "rand", lambda *_args, **_keywords: shared)
    monkeypatch.setattr("sam.verify.rejection._exponential_noise", noise_from_uniforms)
    assert worst_p_value(*verified("typical", 1.0, LIKELY)) < 1e-12


def favour_likely(*arguments) -> torch.Tensor:
    """A lossy rule: likely tokens are favoured, as thresholds on the probability of a draft do."""
    drafts, counts, width, ends, _, logits, bonus, sampling = arguments
    return verify.rejection_sample(
        drafts, counts, width, ends, None, torch.where(logits.softmax(-1) > 0.3, logits + 1.0, logits), bonus, sampling
    )


def test_the_same_test_catches_a_lossy_rule():
    torch.manual_seed(0)
    assert worst_p_value(*verified("typical", 1.0, LIKELY, rule=favour_likely)) < 1e-12


@pytest.mark.network
def test_the_same_test_catches_block_verify():
    lossy = load_original(CACHE, enable_block_verify=True)

    def rule(*arguments):
        # It asks for at least three drafts, so the third stands for the bonus token; and it builds masks of
        # [tokens, batch], so it gets a part at a time.
        drafts, counts, _, _, _, logits, bonus, _ = arguments
        triple = torch.tensor([0, 1, 0])
        drafts, rows = drafts.view(-1, 2)[:, triple], logits.view(-1, 2, 5)[:, triple]
        part = 200
        sampling = SimpleNamespace(all_greedy=False, all_random=True, temperature=torch.ones(part), generators={})
        steps = torch.arange(3, 3 * part + 1, 3)
        parts = [
            lossy.rejection_sample(
                drafts[first : first + part].flatten(),
                [3] * part,
                3,
                steps,
                None,
                rows[first : first + part].reshape(-1, 5),
                bonus[first : first + part],
                sampling,
            )
            for first in range(0, len(counts), part)
        ]
        return torch.cat(parts)[:, :2]

    torch.manual_seed(0)
    tokens, probabilities = verified("typical", 1.0, LIKELY, rule=rule)
    assert worst_p_value(tokens, probabilities[:2]) < 1e-12
