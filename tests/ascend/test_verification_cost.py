"""The published sampler against ours in this environment: operations, passes over the logits, host reads."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from sam import verify
from sam.verify.exact import uniforms
from tests.sam.verify.cost import count_operations
from tests.sam.verify.originals import load_original

CACHE = Path(__file__).parents[2] / ".cache" / "peers"


def make_case(batch: int, k: int, vocabulary: int, device: str) -> SimpleNamespace:
    """Logits like a language model's, drafts of which about 70 % are the likeliest token."""
    generator = torch.Generator().manual_seed(batch * 100 + k)
    logits = 3 * torch.randn(batch, k + 1, vocabulary, generator=generator)
    is_likely = torch.rand(batch, k, generator=generator) < 0.7
    anything = torch.randint(vocabulary, (batch, k), generator=generator)
    drafts = torch.where(is_likely, logits[:, :k].argmax(-1), anything).to(device)
    logits, temperature = logits.to(device), torch.ones(batch, device=device)
    return SimpleNamespace(
        batch=batch,
        k=k,
        logits=logits.flatten(0, 1),
        target=logits[:, :k].flatten(0, 1),
        bonus=logits[:, k],
        drafts=drafts,
        ends=(torch.arange(1, batch + 1) * k).to(device),
        metadata=SimpleNamespace(all_greedy=False, all_random=True, temperature=temperature, generators={}),
    )


def exact_match(case: SimpleNamespace) -> torch.Tensor:
    """Exact match over all logits rows as the engine does it: uniforms on the host, one copy, two calls."""
    width = case.k + 1
    rng_keys = torch.arange(case.batch).repeat_interleave(width).numpy()
    positions = torch.arange(width).repeat(case.batch).numpy()
    draws = torch.from_numpy(uniforms(rng_keys, positions)).to(case.logits.device, non_blocking=True)
    sampled = verify.sample_inverse_cdf(case.logits, draws).view(case.batch, width)
    drafts = torch.full_like(sampled, -2)
    drafts[:, : case.k] = case.drafts
    return verify.accept_matching(sampled, drafts)


def rejection(rule: Callable, case: SimpleNamespace) -> torch.Tensor:
    """A `rejection_sample` of vLLM 0.23's signature, with the bonus tokens drawn as vLLM does: an exponential race."""
    bonus = (case.bonus.softmax(-1) / torch.empty_like(case.bonus).exponential_()).argmax(-1)[:, None].to(torch.int32)
    counts = [case.k] * case.batch
    return rule(case.drafts.flatten(), counts, case.k, case.ends, None, case.target, bonus, case.metadata)


def test_ours_touches_the_logits_least_and_never_reads_the_device(capsys):
    case = make_case(16, 3, 4001, "cpu")
    rules = {
        "ours, exact": exact_match,
        "ours, rejection": partial(rejection, verify.rejection_sample),
        "published": partial(rejection, load_original(CACHE).rejection_sample),
    }
    counts = {name: count_operations(partial(rule, case), case.target.numel()) for name, rule in rules.items()}
    with capsys.disabled():
        for name, count in counts.items():
            print(f"\n{name}: {count}", end="")
    published = counts.pop("published")
    for ours in counts.values():
        assert ours["host_syncs"] == 0
        assert ours["large_outputs"] <= 3 < published["large_outputs"]
        assert ours["aten"] < published["aten"]
