"""Both rules sample the target distribution, whatever is drafted; and controls that must fail do."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from sam.verify import PLACEHOLDER, accept_matching, expand_batch_to_tokens, rejection_sample, sample_inverse_cdf
from sam.verify.uniforms import uniforms

SAMPLES = 200_000
LIMIT = 1e-4  # p-value below which two distributions count as different
TARGETS = {
    "spread": [0.5, 0.2, 0.1, 0.1, 0.1],
    "flat": [0.2] * 5,
    "nearly certain": [0.996, 0.001, 0.001, 0.001, 0.001],
    "masked": [0.6, 0.0, 0.4, 0.0, 0.0],
}


def metadata(temperature=1.0):
    return SimpleNamespace(
        all_greedy=False, all_random=True, temperature=torch.full((SAMPLES,), temperature), generators={}
    )


def p_value(tokens, target):
    counts = torch.bincount(tokens.long(), minlength=len(target)).numpy()
    possible = np.array(target) > 0
    assert counts[~possible].sum() == 0
    return stats.chisquare(counts[possible], np.array(target)[possible] * len(tokens)).pvalue


def standard(target, draft, draft_probs=None):
    torch.manual_seed(0)
    logits = torch.tensor(target).log().expand(SAMPLES, -1).clone()
    drafts = torch.full((SAMPLES,), draft, dtype=torch.int32) if isinstance(draft, int) else draft
    bonus = torch.multinomial(torch.tensor(target), SAMPLES, replacement=True).to(torch.int32)[:, None]
    cumulative = torch.arange(1, SAMPLES + 1, dtype=torch.int32)
    return rejection_sample(drafts, [1] * SAMPLES, 1, cumulative, draft_probs, logits, bonus, metadata())


def exact(target, draft):
    logits = torch.tensor(target).log().expand(2 * SAMPLES, -1)
    keys = np.repeat(np.arange(SAMPLES), 2)
    draws = torch.from_numpy(uniforms(keys, np.tile([0, 1], SAMPLES)))
    sampled = sample_inverse_cdf(logits, draws).view(SAMPLES, 2)
    drafts = torch.stack([torch.full((SAMPLES,), draft), torch.full((SAMPLES,), -2)], 1)
    return accept_matching(sampled, drafts)


@pytest.mark.parametrize("rule", [standard, exact])
@pytest.mark.parametrize("draft", [0, 2, 4])
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())
def test_first_and_second_token_follow_the_target(rule, draft, target):
    output = rule(target, draft)
    assert p_value(output[:, 0], target) > LIMIT
    second = output[:, 1][output[:, 1] != PLACEHOLDER]
    assert len(second) == int((output[:, 0] == draft).sum())  # a second token exactly where the draft stands
    if len(second):
        assert p_value(second, target) > LIMIT


def test_drafts_with_probabilities():
    target, proposal = TARGETS["spread"], [0.1, 0.3, 0.3, 0.2, 0.1]
    torch.manual_seed(1)
    drafts = torch.multinomial(torch.tensor(proposal), SAMPLES, replacement=True).to(torch.int32)
    output = standard(target, drafts, torch.tensor(proposal).expand(SAMPLES, -1))
    assert p_value(output[:, 0], target) > LIMIT
    accepted = float((output[:, 1] != PLACEHOLDER).float().mean())
    assert accepted == pytest.approx(np.minimum(target, proposal).sum(), abs=0.01)


def test_control_shared_uniform_is_caught():
    """The bonus token drawn with the uniform that accepted the draft: what the test above must be able to see."""
    target = TARGETS["spread"]
    logits = torch.tensor(target).log().expand(SAMPLES, -1)
    draws = torch.from_numpy(uniforms(np.arange(SAMPLES), np.zeros(SAMPLES, dtype=np.int64)))
    first = sample_inverse_cdf(logits, draws)
    bonus = sample_inverse_cdf(logits, draws)[first == 0]
    assert p_value(bonus, target) < LIMIT


def test_inverse_cdf_at_a_real_vocabulary():
    torch.manual_seed(0)
    logits = 4 * torch.randn(64, 151_936)
    draws = torch.from_numpy(uniforms(np.arange(64), np.arange(64)))
    sampled = sample_inverse_cdf(logits, draws)
    reference = np.exp(logits.double().numpy())
    cumulative = (reference / reference.sum(-1, keepdims=True)).cumsum(-1)
    expected = [
        int(np.searchsorted(row, u * row[-1], side="right")) for row, u in zip(cumulative, draws.numpy(), strict=True)
    ]
    assert sampled.tolist() == expected


@pytest.mark.parametrize("temperature", [0.3, 1.2])
def test_masked_tokens_are_never_drawn(temperature):
    logits = torch.tensor([[1.0, -torch.inf, 0.5, -torch.inf]]).expand(10_000, -1) / temperature
    for value in (2.0**-53, 1 - 2.0**-53):  # the smallest and the largest that sam.verify.uniforms makes
        edge = torch.full((10_000,), value, dtype=torch.float64)
        assert set(sample_inverse_cdf(logits, edge).tolist()) <= {0, 2}


def test_accepts_up_to_and_including_the_first_difference():
    sampled = torch.tensor([[1, 2, 3, 4], [1, 9, 3, 4], [9, 2, -1, -1], [5, -1, -1, -1]])
    drafts = torch.tensor([[1, 2, 3, -2], [1, 2, 3, -2], [1, -2, -2, -2], [-2, -2, -2, -2]])
    expected = [[1, 2, 3, 4], [1, 9, -1, -1], [9, -1, -1, -1], [5, -1, -1, -1]]
    assert accept_matching(sampled, drafts).tolist() == expected


def test_expand_keeps_dtype_and_replaces():
    x = torch.tensor([0.7, 0.0, 1.3])
    expanded = expand_batch_to_tokens(x, torch.tensor([2, 2, 5]), 5, replace_from=0, replace_to=1)
    assert torch.equal(expanded, torch.tensor([0.7, 0.7, 1.3, 1.3, 1.3]))
    expanded = expand_batch_to_tokens(x, torch.tensor([1, 2, 3]), 3, replace_from=0, replace_to=1)
    assert torch.equal(expanded, torch.tensor([0.7, 1.0, 1.3]))


def test_ragged_greedy_and_random_rows_together():
    logits = torch.full((3, 4), -20.0)
    logits[0, 1] = logits[1, 2] = logits[2, 3] = 20.0
    mixed = SimpleNamespace(
        all_greedy=False, all_random=False, temperature=torch.tensor([0.0, 1.0, 1.0]), generators={}
    )
    output = rejection_sample(
        torch.tensor([1, 0, 3], dtype=torch.int32),
        [2, 0, 1],
        2,
        torch.tensor([2, 2, 3]),
        None,
        logits,
        torch.tensor([[0], [1], [2]]),
        mixed,
    )
    assert output.tolist() == [[1, 2, -1], [1, -1, -1], [3, 2, -1]]


def test_lossy_acceptance_is_refused():
    with pytest.raises(ValueError, match="synthetic changes what is sampled"):
        rejection_sample(
            torch.tensor([0]), [1], 1, torch.tensor([1]), None, torch.zeros(1, 2), torch.tensor([[0]]), metadata(), True
        )
