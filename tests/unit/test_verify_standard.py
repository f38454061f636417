"""Rejection sampling against the looped originals of vllm-ascend 0.11.0rc0, and against the target distribution."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scipy import stats

from sam import verify
from sam.verify.originals import load_looped_originals

CACHE = Path(__file__).parents[2] / ".cache" / "peers"
ORIGINAL_GREEDY = -1  # the originals' mark; vLLM 0.23's is 0


@pytest.fixture(scope="module")
def originals():
    return load_looped_originals(CACHE)


def random_case(seed: int, vocabulary: int) -> SimpleNamespace:
    """A batch as vLLM hands it over: ragged drafts, greedy and random rows, seeds, masks, with or without q."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high, *size):
        return torch.randint(high, size, generator=generator)

    batch, longest = int(integers(6, 1)) + 1, int(integers(5, 1))
    counts = integers(longest + 1, batch).tolist()
    tokens = sum(counts)
    logits = 2 * torch.randn(tokens, vocabulary, generator=generator)
    if seed % 3 == 0 and tokens:  # top-k or top-p: all but the largest masked
        logits[logits < logits.topk(3).values[:, -1:]] = -torch.inf
    drafts = integers(vocabulary, tokens)
    if seed % 4 and tokens:  # most drafts likely, so that some are accepted
        likely = torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(1)
        drafts = torch.where(torch.rand(tokens, generator=generator) < 0.7, likely, drafts)
    draft_probs = None
    if seed % 2:
        draft_probs = (logits + torch.randn(tokens, vocabulary, generator=generator)).softmax(-1)
    greedy = [torch.zeros(batch), torch.ones(batch), integers(2, batch).float()][int(integers(3, 1))].bool()
    return SimpleNamespace(
        batch=batch,
        vocabulary=vocabulary,
        counts=counts,
        longest=max(counts),
        ends=torch.tensor(counts).cumsum(0).to(torch.int32),
        logits=logits,
        drafts=drafts.to(torch.int32) if seed % 5 else drafts,
        draft_probs=draft_probs,
        bonus=integers(vocabulary, batch, 1).to(torch.int32),
        greedy=greedy,
        seeded=[row for row in range(batch) if seed % 7 in (0, 1) and int(integers(2, 1))],
    )


def metadata(case, greedy_mark: float) -> SimpleNamespace:
    return SimpleNamespace(
        all_greedy=bool(case.greedy.all()),
        all_random=not bool(case.greedy.any()),
        temperature=torch.where(case.greedy, greedy_mark, 0.7),
        generators={row: torch.Generator().manual_seed(1000 + row) for row in case.seeded},
    )


@pytest.mark.parametrize("vocabulary", [7, 300])
def test_rejection_sample_equals_the_original(originals, vocabulary):
    accepted = rejected = 0
    for seed in range(2000):
        case = random_case(seed, vocabulary)
        if not sum(case.counts) and case.greedy.any():
            continue  # the original takes the maximum of no rows
        torch.manual_seed(seed)
        expected = originals.rejection_sample(
            case.drafts,
            case.counts,
            case.longest,
            case.ends,
            case.draft_probs,
            case.logits.softmax(-1),
            case.bonus,
            metadata(case, ORIGINAL_GREEDY),
        )
        torch.manual_seed(seed)
        found = verify.rejection_sample(
            case.drafts,
            case.counts,
            case.longest,
            case.ends,
            case.draft_probs,
            case.logits,
            case.bonus,
            metadata(case, verify.GREEDY),
        )
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected), f"seed {seed}: {found.tolist()} instead of {expected.tolist()}"
        kept = (expected != verify.PLACEHOLDER).sum(1)
        accepted += int((kept - 1).sum())
        rejected += int((kept <= torch.tensor(case.counts)).sum())
    assert accepted > 1000 and rejected > 1000


def test_sample_recovered_tokens_equals_the_original(originals):
    for seed in range(1000):
        case = random_case(seed, 50)
        arguments = (case.longest, case.counts, case.ends, case.drafts, case.draft_probs, case.logits.softmax(-1))
        torch.manual_seed(seed)
        expected = originals.sample_recovered_tokens(*arguments, metadata(case, ORIGINAL_GREEDY), torch.device("cpu"))
        torch.manual_seed(seed)
        found = verify.sample_recovered_tokens(*arguments, metadata(case, verify.GREEDY), torch.device("cpu"))
        assert found.dtype == expected.dtype and torch.equal(found, expected), f"seed {seed}"


def test_rejection_random_sample_equals_the_original(originals):
    for seed in range(1000):
        case = random_case(seed, 20)
        generator = torch.Generator().manual_seed(seed)
        recovered = torch.randint(20, (len(case.drafts),), generator=generator)
        draws = torch.rand(len(case.drafts), dtype=torch.float64, generator=generator)
        outputs = [torch.full((case.batch, case.longest + 1), verify.PLACEHOLDER, dtype=torch.int32) for _ in range(2)]
        functions = (originals.rejection_random_sample_pytorch, verify.rejection_random_sample)
        for function, output in zip(functions, outputs, strict=True):
            function(
                output,
                case.ends,
                case.drafts,
                case.draft_probs,
                case.logits.softmax(-1),
                case.bonus,
                recovered,
                draws,
                case.greedy,
                case.longest,
                20,
                IS_NGRAM=case.draft_probs is None,
            )
        assert torch.equal(*outputs), f"seed {seed}"


def test_expand_batch_to_tokens_equals_the_original(originals):
    for seed in range(500):
        case = random_case(seed, 5)
        for x in (torch.rand(case.batch), torch.randint(3, (case.batch,), dtype=torch.int32), case.greedy.float()):
            arguments = (x, case.ends, sum(case.counts), 0, 1)
            expected, found = originals.expand_batch_to_tokens(*arguments), verify.expand_batch_to_tokens(*arguments)
            assert found.dtype == expected.dtype and torch.equal(found, expected)


def test_synthetic_acceptance_is_refused():
    with pytest.raises(ValueError, match="synthetic"):
        verify.rejection_sample(None, [], 0, None, None, torch.zeros(0, 2), None, None, synthetic_mode=True)


SAMPLES = 200_000
TARGETS = {
    "typical": [0.5, 0.2, 0.1, 0.1, 0.1],
    "flat": [0.2] * 5,
    "near-deterministic": [0.996, 0.001, 0.001, 0.001, 0.001],
}


def verified(
    name: str, temperature: float, draft_probs, rule=verify.rejection_sample
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [SAMPLES, 3] of requests with two drafts, and the distributions [3, 5] of the three positions."""
    base = torch.tensor(TARGETS[name]).log() / temperature
    rows = torch.stack([base, base.roll(1), base.roll(2)])
    probabilities = rows.softmax(-1)
    if draft_probs is None:
        drafts = torch.tensor([0, 1]).repeat(SAMPLES)
        q = None
    else:
        q = draft_probs.expand(2 * SAMPLES, 5)
        drafts = torch.multinomial(draft_probs, 2 * SAMPLES, replacement=True)
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
    for position, expected in enumerate(probabilities):
        reached = tokens[:, position][tokens[:, position] != verify.PLACEHOLDER]
        if len(reached) > 1000:
            counts = torch.bincount(reached, minlength=5).double().numpy()
            test = stats.chisquare(counts, expected.double().numpy() * len(reached), sum_check=False)
            smallest = min(smallest, float(test.pvalue))
    return smallest


@pytest.mark.parametrize("draft_probs", [None, [0.2] * 5, [0.1, 0.6, 0.1, 0.1, 0.1]])
@pytest.mark.parametrize("temperature", [0.3, 1.2])
@pytest.mark.parametrize("name", TARGETS)
def test_tokens_follow_the_target(name, temperature, draft_probs):
    torch.manual_seed(0)
    probs = None if draft_probs is None else torch.tensor(draft_probs)
    assert worst_p_value(*verified(name, temperature, probs)) > 1e-4


def test_the_same_test_catches_shared_noise(monkeypatch):
    """A uniform that accepts or rejects a draft also decides which token is recovered."""
    torch.manual_seed(0)
    shared = torch.rand(2 * SAMPLES, dtype=torch.float64)

    def noise_from_uniforms(num_draft_tokens, vocabulary, *_):
        noise = torch.empty(len(num_draft_tokens), vocabulary).exponential_()
        noise[:, 2] = -(1 - shared.view(-1, 2)[:, 0]).log()  # exponential, but not independent
        return noise

    monkeypatch.setattr(torch, "rand", lambda *_args, **_keywords: shared)
    monkeypatch.setattr("sam.verify.standard._exponential_noise", noise_from_uniforms)
    assert worst_p_value(*verified("typical", 1.0, None)) < 1e-12


def favour_likely(*arguments) -> torch.Tensor:
    """A lossy rule: likely tokens are favoured, as thresholds on the probability of a draft do."""
    drafts, counts, width, ends, _, logits, bonus, sampling = arguments
    return verify.rejection_sample(
        drafts, counts, width, ends, None, torch.where(logits.softmax(-1) > 0.3, logits + 1.0, logits), bonus, sampling
    )


def test_the_same_test_catches_a_lossy_rule():
    torch.manual_seed(0)
    assert worst_p_value(*verified("typical", 1.0, None, favour_likely)) < 1e-12
