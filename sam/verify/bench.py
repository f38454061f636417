"""`python -m sam.verify bench`: the verifiers against published ones, in one process.

Prints, for every batch size and number of drafts, median milliseconds, the ratio to ours, the fraction of the
bandwidth floor (what reading every logit once would take, at the rate of a plain sum over them), aten operations,
outputs of at least [tokens, vocabulary], and reads of the device by the host.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sam import verify
from sam.verify.originals import load_original
from sam.verify.uniforms import uniforms
from sam.vllm.baselines import stock_rejection_sample

# Operations by which the host reads a tensor, or whose output's shape depends on a tensor's content.
HOST_READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "repeat_interleave.Tensor", "item")

EXACT, REJECTION = "ours, exact", "ours, rejection"
ASCEND, VLLM = "vllm-ascend 0.23.0.post1", "vllm 0.23.0"


class _Counter(TorchDispatchMode):
    def __init__(self, large: int):
        super().__init__()
        self.large = large
        self.counts = {"aten": 0, "large_outputs": 0, "host_syncs": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        self.counts["aten"] += 1
        name = func.name().removeprefix("aten::")
        self.counts["host_syncs"] += name.startswith(HOST_READS) and kwargs.get("output_size") is None
        if not func.is_view:
            outputs = output if isinstance(output, tuple | list) else (output,)
            self.counts["large_outputs"] += sum(
                isinstance(x, torch.Tensor) and x.numel() >= self.large and not any(x is a for a in args)
                for x in outputs
            )
        return output


def count_operations(call: Callable[[], object], large: int) -> dict[str, int]:
    """Count a call's aten operations, their outputs (not views) of at least `large` elements, and reads by the host."""
    with _Counter(large) as counter:
        call()
    return counter.counts


def _case(batch: int, k: int, vocabulary: int, device: str, seeds: int) -> SimpleNamespace:
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
            generators={row: torch.Generator(device).manual_seed(row) for row in range(seeds)},
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


def _verifiers(cache: Path, device: str) -> dict[str, Callable | str]:
    """Callables by name, or the reason why there is none."""
    found: dict[str, Callable | str] = {EXACT: exact_match, REJECTION: partial(rejection, verify.rejection_sample)}
    published = {ASCEND: lambda: load_original(cache).rejection_sample, VLLM: lambda: stock_rejection_sample(device)}
    for name, load in published.items():
        try:
            found[name] = partial(rejection, load())
        except Exception as error:
            found[name] = _first_line(error)
    return found


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


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


def floor_ms(logits: torch.Tensor, device: str) -> float:
    """Milliseconds to read every logit once, at the rate of the fastest of some sums over at least 512 MiB."""
    repeats = max(1, 2**29 // (logits.numel() * logits.element_size()))
    large = logits.repeat(repeats, 1)
    return min(median_ms(large.sum, 1, device) for _ in range(5)) / repeats


def bench(batches, drafts, vocabulary: int, device: str, repeats: int, seeds: bool, cache: Path) -> list[dict]:
    """Measure every batch size, number of drafts and verifier.

    Returns:
        A row each, as printed; `not_run` gives the reason where a verifier cannot run.
    """
    rows, verifiers = [], _verifiers(cache, device)
    cases = [(batch, k) for batch in batches for k in drafts]
    for done, (batch, k) in enumerate(cases, start=1):
        case = _case(batch, k, vocabulary, device, batch if seeds else 0)
        floor = floor_ms(case.logits, device)
        for name, function in verifiers.items():
            print(f"\r{done}/{len(cases)}: batch {batch}, k {k}, {name:30}", end="", file=sys.stderr, flush=True)
            row = {"batch": batch, "k": k, "verifier": name}
            rows.append(row)
            if isinstance(function, str):
                row["not_run"] = function
                continue
            call = partial(function, case)
            try:
                median = median_ms(call, repeats, device)
                operations = count_operations(call, case.target.numel())
            except Exception as error:
                row["not_run"] = _first_line(error)
                continue
            if name == EXACT:
                exact_ms = median
            row.update(median_ms=median, **operations, ratio_to_exact=median / exact_ms, floor_fraction=floor / median)
    print(file=sys.stderr)
    return rows


def _table(rows: list[dict]) -> str:
    head = "{batch:5} {k:2}  {verifier:30} "
    figures = "{median_ms:9.2f} {ratio_to_exact:7.1f} {floor_fraction:6.2f} {aten:6} {large_outputs:6} {host_syncs:6}"
    lines = ["batch  k  verifier                              ms   ratio  floor   aten  [T,V]  syncs"]
    for row in rows:
        lines.append((head + ("not run: {not_run:.70}" if "not_run" in row else figures)).format_map(row))
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m sam.verify", description=__doc__)
    parser.add_argument("command", choices=["bench"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--k", type=int, nargs="+", default=[3, 8])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seeds", action="store_true", help="give every request a seed of its own")
    parser.add_argument(
        "--cache", type=Path, default=Path(".cache/peers"), help="where the published packages are kept"
    )
    parser.add_argument("--json", action="store_true", help="one JSON list instead of the table")
    options = parser.parse_args(arguments)
    rows = bench(
        options.batch, options.k, options.vocabulary, options.device, options.repeats, options.seeds, options.cache
    )
    print(json.dumps(rows, indent=1) if options.json else _table(rows))
    return 0
