"""Verifiers to be timed on a device: a step like a language model's, and calls as the engine makes them."""

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import torch

from sam import verify
from sam.verify.uniforms import uniforms


def make_case(batch: int, k: int, vocabulary: int, device: str) -> SimpleNamespace:
    """Logits like a language model's, drafts of which about 70 % are the likeliest token."""
    generator = torch.Generator().manual_seed(batch * 100 + k)
    logits = 3 * torch.randn(batch * (k + 1), vocabulary, generator=generator)
    draft_rows = (torch.arange(batch)[:, None] * (k + 1) + torch.arange(k)).flatten()
    likely = torch.rand(batch * k, generator=generator) < 0.7
    anything = torch.randint(vocabulary, (batch * k,), generator=generator)
    return SimpleNamespace(
        batch=batch,
        k=k,
        logits=logits.to(device),
        target=logits[draft_rows].to(device),
        bonus_rows=(torch.arange(batch) * (k + 1) + k).to(device),
        drafts=torch.where(likely, logits[draft_rows].argmax(-1), anything).to(device),
        counts=[k] * batch,
        ends=(torch.arange(1, batch + 1) * k).to(device),
        metadata=SimpleNamespace(
            all_greedy=False,
            all_random=True,
            temperature=torch.ones(batch, device=device),
            generators={},
        ),
    )


def exact_match(case) -> torch.Tensor:
    """Exact match over all logits rows as the engine does it: uniforms on the host, one copy, two calls."""
    width = case.k + 1
    rng_keys = torch.arange(case.batch).repeat_interleave(width).numpy()
    positions = torch.arange(width).repeat(case.batch).numpy()
    draws = torch.from_numpy(uniforms(rng_keys, positions)).to(case.logits.device, non_blocking=True)
    sampled = verify.sample_inverse_cdf(case.logits, draws).view(case.batch, width)
    drafts = torch.full_like(sampled, -2)
    drafts[:, : case.k] = case.drafts.view(case.batch, case.k)
    return verify.accept_matching(sampled, drafts)


def rejection(rule, case) -> torch.Tensor:
    """A `rejection_sample` of vLLM 0.23's signature, with the bonus tokens drawn as vLLM does: an exponential race."""
    noise = torch.empty((case.batch, case.logits.shape[1]), device=case.logits.device).exponential_()
    bonus = (case.logits[case.bonus_rows].softmax(-1) / noise).argmax(-1)[:, None].to(torch.int32)
    return rule(case.drafts, case.counts, case.k, case.ends, None, case.target, bonus, case.metadata)


def median_ms(call: Callable[[], object], repeats: int, device: str) -> float:
    """Median of `repeats` calls after one to warm up."""
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        call()
        if device != "cpu":
            getattr(torch, torch.device(device).type).synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    return statistics.median(times[1:])
