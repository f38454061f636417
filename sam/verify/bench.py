"""`python -m sam.verify bench`: the verifiers against the published ones, in one process.

Prints, for every batch size and number of drafts, median milliseconds, the ratio to ours, the fraction of the
bandwidth floor (what reading every logit once would take, at the rate of a plain sum over them), aten operations,
outputs of at least [tokens, vocabulary], and reads of the device by the host.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sam import verify
from sam.verify.originals import load_looped_originals, load_vectorised_originals
from sam.verify.uniforms import uniforms

# Operations by which the host reads a tensor, or whose output's shape depends on a tensor's content.
HOST_READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "repeat_interleave.Tensor", "item")

EXACT = "ours, exact"
LOOPED = "vllm-ascend 0.11.0rc0, loops"
VECTORISED = "vllm-ascend 0.23.0.post1"
VLLM = "vllm 0.23.0"


@dataclass
class Operations:
    """aten: operations called; large_outputs: outputs (not views) of at least `large` elements; host_syncs."""

    aten: int = 0
    large_outputs: int = 0
    host_syncs: int = 0


class _Counter(TorchDispatchMode):
    def __init__(self, large: int):
        super().__init__()
        self.large = large
        self.counts = Operations()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        self.counts.aten += 1
        name = func.name().removeprefix("aten::")
        sized = "output_size" in kwargs and kwargs["output_size"] is not None
        self.counts.host_syncs += name.startswith(HOST_READS) and not sized
        if not func.is_view:
            outputs = output if isinstance(output, tuple | list) else (output,)
            self.counts.large_outputs += sum(
                isinstance(x, torch.Tensor) and x.numel() >= self.large and not _same(x, args) for x in outputs
            )
        return output


def _same(x: torch.Tensor, args) -> bool:
    return any(x is a for a in args)


def count_operations(call: Callable[[], object], large: int) -> Operations:
    """Count the operations of one call; an output counts as large from `large` elements."""
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


def _bonus(case) -> torch.Tensor:
    """The bonus tokens by vLLM's own way, the exponential race; exact match needs no such step."""
    noise = torch.empty((case.batch, case.logits.shape[1]), device=case.logits.device).exponential_()
    return (case.logits[case.bonus_rows].softmax(-1) / noise).argmax(-1)[:, None].to(torch.int32)


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


def standard(case) -> torch.Tensor:
    """Rejection sampling, with the bonus tokens drawn as vLLM does."""
    bonus = _bonus(case)
    return verify.rejection_sample(case.drafts, case.counts, case.k, case.ends, None, case.target, bonus, case.metadata)


def _looped(originals):
    def call(case):
        probabilities = case.target.softmax(-1)
        bonus = _bonus(case)
        return originals.rejection_sample(
            case.drafts, case.counts, case.k, case.ends, None, probabilities, bonus, case.metadata
        )

    return call


def _published(function):
    """A `rejection_sample` of vLLM 0.23's signature."""

    def call(case):
        bonus = _bonus(case)
        return function(case.drafts, case.counts, case.k, case.ends, None, case.target, bonus, case.metadata)

    return call


def _vllm(device: str):
    from sam.vllm.baselines import stock_rejection_sample

    return _published(stock_rejection_sample(device))


def _baselines(cache: Path, device: str) -> dict[str, Callable | str]:
    """Callables by name, or the reason why there is none."""
    found: dict[str, Callable | str] = {"ours, rejection": standard}
    sources = {
        LOOPED: lambda: _looped(load_looped_originals(cache)),
        VECTORISED: lambda: _published(load_vectorised_originals(cache).rejection_sample),
        VLLM: lambda: _vllm(device),
    }
    for name, load in sources.items():
        try:
            found[name] = load()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


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


def _measure(name: str, call: Callable[[], object], case, repeats: int, device: str) -> dict:
    row = {"batch": case.batch, "k": case.k, "verifier": name}
    try:
        row["median_ms"] = median_ms(call, repeats, device)
        return {**row, **asdict(count_operations(call, case.target.numel()))}
    except Exception as error:
        return {**row, "not_run": f"{type(error).__name__}: {error}".splitlines()[0]}


def bench(batches, drafts, vocabulary: int, device: str, repeats: int, seeds: bool, cache: Path) -> list[dict]:
    """Measure every batch size, number of drafts and verifier.

    Returns:
        A row each, as printed; `not_run` gives the reason where a verifier cannot run.
    """
    rows = []
    verifiers = {EXACT: exact_match, **_baselines(cache, device)}
    cases = [(batch, k) for batch in batches for k in drafts]
    for done, (batch, k) in enumerate(cases, start=1):
        case = _case(batch, k, vocabulary, device, batch if seeds else 0)
        floor = floor_ms(case.logits, device)
        for name, function in verifiers.items():
            print(f"\r{done}/{len(cases)}: batch {batch}, k {k}, {name:30}", end="", file=sys.stderr, flush=True)
            if isinstance(function, str):
                rows.append({"batch": batch, "k": k, "verifier": name, "not_run": function})
                continue
            row = _measure(name, functools.partial(function, case), case, repeats, device)
            if "median_ms" in row:
                exact = row if name == EXACT else next(r for r in rows[::-1] if r["verifier"] == EXACT)
                row["ratio_to_exact"] = row["median_ms"] / exact["median_ms"]
                row["floor_fraction"] = floor / row["median_ms"]
            rows.append(row)
    print(file=sys.stderr)
    return rows


def _print_table(rows: list[dict]) -> None:
    columns = f"{'ms':>9} {'ratio':>7} {'floor':>6} {'aten':>6} {'[T,V]':>6} {'syncs':>6}"
    print(f"{'batch':>5} {'k':>2}  {'verifier':30} {columns}")
    for row in rows:
        head = f"{row['batch']:5} {row['k']:2}  {row['verifier']:30}"
        if "not_run" in row:
            print(f"{head} not run: {row['not_run'][:70]}")
            continue
        print(
            f"{head} {row['median_ms']:9.2f} {row['ratio_to_exact']:7.1f} {row['floor_fraction']:6.2f} "
            f"{row['aten']:6} {row['large_outputs']:6} {row['host_syncs']:6}"
        )


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns its exit code."""
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
    if options.json:
        json.dump(rows, sys.stdout, indent=1)
        print()
    else:
        _print_table(rows)
    return 0
