"""Rejection sampling gives what vllm-ascend 0.23.0.post1's gives, and follows the target distribution.

The same tests catch rules and noise that do not.
"""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from scipy import stats

from sam import verify
from tests.sam.verify.originals import load_original
from tests.sam.verify.test_exact import SAMPLES, TARGETS

CACHE = Path(__file__).parents[3] / ".cache" / "peers"
LIKELY, UNLIKELY = [0, 1], [3, 0]  # fixed drafts of two tokens; with `masked` the unlikely one is impossible
CASES = 2 * 420  # each combination of the remainders by which `random_case` chooses, twice


def random_case(seed: int, vocabulary: int) -> tuple[list[int], tuple]:
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
    seeded = [row for row in range(batch) if seed % 7 in (0, 1) and int(integers(2, 1))]
    sampling = SimpleNamespace(
        all_greedy=bool(greedy.all()), all_random=not bool(greedy.any()),
        temperature=torch.where(greedy, verify.GREEDY, 0.7),
        generators={row: torch.Generator().manual_seed(1000 + row) for row in seeded},
    )  # fmt: skip
    drafts = drafts.to(torch.int32) if seed % 5 else drafts
    ends, bonus = torch.tensor(counts).cumsum(0).to(torch.int32), integers(vocabulary, batch, 1).to(torch.int32)
    return counts, (drafts, counts, max(counts), ends, draft_probs, logits, bonus, sampling)


@pytest.fixture(scope="module")
def original():
    return load_original(CACHE)


@pytest.mark.network
@pytest.mark.parametrize("vocabulary", [7, 50, 300])
def test_rejection_sample_equals_the_original(original, vocabulary):
    """The original gives seeded requests without drafts noise too: that moves a generator but no token of the step."""
    accepted = rejected = 0
    for seed in range(CASES):
        outputs = []
        for rule in (original.rejection_sample, verify.rejection_sample):
            counts, arguments = random_case(seed, vocabulary)
            torch.manual_seed(seed)
            outputs.append(rule(*arguments) if sum(counts) else None)
        if not sum(counts):
            continue
        expected, found = outputs
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected), f"seed {seed}: {found.tolist()} instead of {expected.tolist()}"
        kept = (expected != verify.PLACEHOLDER).sum(1)
        accepted += int((kept - 1).sum())
        rejected += int((kept <= torch.tensor(counts)).sum())
    assert accepted > 400 and rejected > 400


@pytest.mark.parametrize("draft_probs", [None, torch.full((4, 6), 1 / 6)], ids=["one-hot", "probabilities"])
def test_what_cannot_be_verified_is_sampled_plainly(draft_probs):
    torch.manual_seed(0)
    logits = torch.full((4, 6), -torch.inf)
    logits[:, 2] = 0.0
    logits[3] = torch.nan
    arguments = ([1, 1, 1, 1], 1, torch.arange(1, 5), draft_probs, logits, torch.full((4, 1), 5))
    sampling = SimpleNamespace(all_greedy=False, all_random=True, temperature=torch.ones(4), generators={})
    drafts = torch.tensor([-1, 6, 2, 2])
    tokens = verify.rejection_sample(drafts, *arguments, sampling)
    assert tokens.tolist() == [[2, -1], [2, -1], [2, 5], [0, -1]]
    with pytest.raises(ValueError, match="synthetic"):
        verify.rejection_sample(drafts, *arguments, sampling, synthetic_mode=True)


@pytest.mark.statistical
def test_a_draft_that_is_no_token_takes_no_share_from_one():
    torch.manual_seed(0)
    count = 50_000
    logits = torch.tensor([0.5, 0.3, 0.2]).log().expand(count, -1)
    sampling = SimpleNamespace(all_greedy=False, all_random=True, temperature=torch.ones(count), generators={})
    for outside in (-1, 3):
        drafts, bonus = torch.full((count,), outside), torch.zeros(count, 1)
        tokens = verify.rejection_sample(
            drafts, [1] * count, 1, torch.arange(1, count + 1), None, logits, bonus, sampling
        )
        observed = torch.bincount(tokens[:, 0].long(), minlength=3).numpy()
        assert stats.chisquare(observed, [0.5 * count, 0.3 * count, 0.2 * count]).pvalue > 1e-4


def test_ragged_greedy_and_random_rows_together():
    logits = torch.full((3, 4), -20.0)
    logits[0, 1] = logits[1, 2] = logits[2, 3] = 20.0
    mixed = SimpleNamespace(
        all_greedy=False, all_random=False, temperature=torch.tensor([0.0, 1.0, 1.0]), generators={}
    )
    drafts, bonus = torch.tensor([1, 0, 3], dtype=torch.int32), torch.tensor([[0], [1], [2]])
    output = verify.rejection_sample(drafts, [2, 0, 1], 2, torch.tensor([2, 2, 3]), None, logits, bonus, mixed)
    assert output.tolist() == [[1, 2, -1], [1, -1, -1], [3, 2, -1]]


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
    bonus = torch.multinomial(probabilities[2], SAMPLES, replacement=True)[:, None]
    sampling = SimpleNamespace(all_greedy=False, all_random=True, temperature=torch.ones(SAMPLES), generators={})
    ends, logits = torch.arange(2, 2 * SAMPLES + 1, 2), rows[:2].repeat(SAMPLES, 1)
    return rule(drafts, [2] * SAMPLES, 2, ends, q, logits, bonus, sampling).to(torch.int64), probabilities


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


@pytest.mark.statistical
@pytest.mark.parametrize("temperature", [0.3, 1.2])
@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("drafts", [LIKELY, UNLIKELY])
def test_tokens_follow_the_target(name, temperature, drafts):
    torch.manual_seed(0)
    tokens, probabilities = verified(name, temperature, drafts)
    assert worst_p_value(tokens, probabilities) > 1e-4
    assert torch.equal(tokens[:, 1] != verify.PLACEHOLDER, tokens[:, 0] == drafts[0])  # on where the draft stands


@pytest.mark.statistical
@pytest.mark.parametrize("q", [[0.2] * 5, [0.1, 0.6, 0.1, 0.1, 0.1]])
@pytest.mark.parametrize("temperature", [0.3, 1.2])
@pytest.mark.parametrize("name", TARGETS)
def test_tokens_follow_the_target_with_drafts_of_probabilities(name, temperature, q):
    torch.manual_seed(0)
    tokens, probabilities = verified(name, temperature, [], q)
    assert worst_p_value(tokens, probabilities) > 1e-4
    accepted = (tokens[:, 1] != verify.PLACEHOLDER).double().mean()
    assert float(accepted) == pytest.approx(float(torch.minimum(probabilities[0], torch.tensor(q)).sum()), abs=0.01)


@pytest.mark.statistical
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


@pytest.mark.statistical
def test_the_same_test_catches_a_lossy_rule():
    torch.manual_seed(0)
    assert worst_p_value(*verified("typical", 1.0, LIKELY, rule=favour_likely)) < 1e-12
