"""`python -m recipe.switch_bench`: every policy and every peer on the same work, at the same time, on this machine.

Five workloads: `rollout`, a round of the tiny task as the quickstart generates it; `bulk`, a batch in which nobody
finishes before the others; `single`, one long request; `random`, text that never repeats, which no drafter can win on;
`random few`, the same with a few requests, where a step is short and what a drafter costs weighs most.

Each variant has an engine of its own in this process. They run side by side, a twentieth of a second each in turn, so
that whatever else the machine does falls on all alike. Sampling is exact: every run of a workload must give the same
tokens, so the seconds are of the same work.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import time
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import numpy as np

from recipe.environment import CPU, OFFLINE

WORKLOADS = ("rollout", "bulk", "single", "random", "random few")
THRESHOLDS = (4, 8, 16, 32, 64)
VARIANTS = ("off", *(f"threshold {n}" for n in THRESHOLDS), "always", "goodput", "ngram", "suffix")
TAIL_REQUESTS = 64  # as configs/dapo_tiny_cpu.yaml
FEW_REQUESTS = 12
SLICE_SECONDS = 0.05
KV_CACHE_SHARE = 0.03  # of the memory, for each engine


@dataclass
class Work:
    """Requests that start together: prompts, and keywords of SamplingParams for each."""

    prompts: list[list[int]]
    sampling: list[dict]


@dataclass
class Runs:
    """What the runs of one variant on one workload came to."""

    seconds: list[float] = field(default_factory=list)
    tail: list[float] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    on_share: float = 0.0


def make_work(assets: Path, prompts: int, samples: int) -> dict[str, Work]:
    """The workloads; `prompts` and `samples` are a round's."""
    import pandas
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    rows = pandas.read_parquet(assets / "train.parquet")["prompt"].head(prompts)
    texts = [tokenizer.apply_chat_template(list(map(dict, row)), add_generation_prompt=True) for row in rows]
    texts = [list(text["input_ids"] if hasattr(text, "keys") else text) for text in texts]
    grouped = [text for text in texts for _ in range(samples)]

    def work(prompts: list[list[int]], **keywords) -> Work:
        common = {"temperature": 1.0, "detokenize": False, "logprobs": 0}
        return Work(prompts, [{**common, **keywords, "seed": seed} for seed in range(len(prompts))])

    # At this temperature all tokens are about as likely.
    random = {"ignore_eos": True, "temperature": 1000.0}
    return {
        "rollout": work(grouped, max_tokens=512),
        "bulk": work(grouped, max_tokens=160, ignore_eos=True),
        "single": work(texts[:1], max_tokens=500, ignore_eos=True),
        "random": work(grouped, max_tokens=160, **random),
        "random few": work(grouped[:FEW_REQUESTS], max_tokens=400, **random),
    }


class Engine:
    """One vLLM engine in this process, run a slice at a time, with a drafter that starts anew in every run."""

    def __init__(self, assets: Path, variant: str, draft_tokens: int):
        from vllm import LLM

        from recipe.configuration import compose_config
        from recipe.speculation import Speculation

        self.variant = variant
        method = variant if variant in ("off", "ngram", "suffix") else "sam"
        config = compose_config("dapo_tiny_cpu", [f"speculation={method}", f"assets={assets}"])
        policy, _, threshold = variant.partition(" ")
        section = {**config.speculation, "num_speculative_tokens": draft_tokens}
        if method == "sam":
            section |= {"policy": policy, "batch_size_threshold": int(threshold or 0)}
        rollout = config.actor_rollout_ref.rollout
        self.llm = LLM(
            str(assets / "model"),
            dtype=rollout.dtype,
            max_model_len=rollout.max_model_len,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            gpu_memory_utilization=KV_CACHE_SHARE,
            enforce_eager=True,
            **Speculation.from_config(section).vllm_arguments(),
        )
        from sam.vllm.metrics import StepRecorder

        core = self.llm.llm_engine.engine_core.engine_core
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.recorder = StepRecorder.attach(self.runner)

    def _renew_drafter(self) -> None:
        """Forget the responses of earlier runs, which are those of this one; keep what goodput knows of step costs."""
        if self.variant in ("off", "ngram"):
            return
        old = self.runner.drafter
        self.runner.drafter = proposer = type(old)(self.runner.vllm_config)
        if self.variant != "suffix":
            proposer.bind(self.runner)
            proposer.policy, old.policy.counters = old.policy, proposer.counters

    def begin(self, work: Work) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._renew_drafter()
        self.llm.reset_prefix_cache()
        self.recorder.take()
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.seconds = self.tail = 0.0
        started = time.perf_counter()
        for i, (prompt, keywords) in enumerate(zip(work.prompts, work.sampling, strict=True)):
            sampling = SamplingParams(**keywords, output_kind=RequestOutputKind.FINAL_ONLY)
            self.llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, sampling)
        self.seconds += time.perf_counter() - started

    def advance(self) -> bool:
        """Run for a slice; False when nothing is left."""
        engine = self.llm.llm_engine
        began = now = time.perf_counter()
        while now - began < SLICE_SECONDS and (left := engine.get_num_unfinished_requests()):
            step = now
            for output in engine.step():
                self.tokens[output.request_id] = tuple(output.outputs[0].token_ids)
            now = time.perf_counter()
            self.tail += (now - step) * (left <= TAIL_REQUESTS)
        self.seconds += now - began
        return engine.has_unfinished_requests()

    def end(self, runs: Runs) -> dict[str, tuple[int, ...]]:
        """Keep what the run came to, and give its tokens by request."""
        runs.seconds.append(self.seconds)
        runs.tail.append(self.tail)
        steps = self.recorder.take()
        runs.drafted, runs.accepted = int(steps["drafted"].sum()), int(steps["accepted"].sum())
        runs.on_share = float((steps["drafted"] > 0).mean())
        if getattr(getattr(self.runner, "drafter", None), "counters", {}).get("faults"):
            raise RuntimeError(f"{self.variant}: drafting failed, see the log")
        return self.tokens


def run_side_by_side(engines: list[Engine], work: Work, results: dict[str, Runs]) -> None:
    """One run of each engine on the same work, a slice each in turn.

    Raises:
        RuntimeError: two variants gave different tokens.
    """
    for engine in engines:
        engine.begin(work)
    gc.collect()
    busy = list(engines)
    while busy:
        busy = [engine for engine in busy if engine.advance()]
    tokens = {engine.variant: engine.end(results[engine.variant]) for engine in engines}
    first, *others = engines
    for other in others:
        if tokens[other.variant] != tokens[first.variant]:
            raise RuntimeError(f"{other.variant} gave other tokens than {first.variant}")


def compare(
    assets: Path, workloads: dict[str, Work], variants: tuple[str, ...], repeats: int, draft_tokens: int
) -> dict[str, dict[str, Runs]]:
    """Runs by workload and variant; the first run of each is a warm-up and does not count."""
    from tqdm import tqdm

    engines = [Engine(assets, variant, draft_tokens) for variant in tqdm(variants, unit="engine", disable=None)]
    gc.freeze()  # the engines themselves: a collection in one's slice would walk through all of them
    results = {name: {variant: Runs() for variant in variants} for name in workloads}
    with tqdm(total=len(workloads) * (repeats + 1), unit="run", disable=None) as bar:
        for name, work in workloads.items():
            for repeat in range(repeats + 1):
                bar.set_description(name)
                runs = results[name] if repeat else {variant: Runs() for variant in variants}
                # Another one begins each time: none always follows the same neighbour.
                turn = repeat % len(engines)
                run_side_by_side(engines[turn:] + engines[:turn], work, runs)
                bar.update()
    return results


def median_interval(values: list[float]) -> list[float]:
    """Median, and the narrowest two values around it between which the true median lies with 95 %: the range, up to
    six values (order statistics: Conover, Practical Nonparametric Statistics, chapter 3.2)."""
    count, outside, beyond = len(values), 0, 0.0
    while (beyond := beyond + math.comb(count, outside) / 2**count) <= 0.025:
        outside += 1
    ordered, outside = sorted(values), max(0, outside - 1)
    return [round(float(v), 3) for v in (np.median(values), ordered[outside], ordered[count - 1 - outside])]


def table(results: dict[str, dict[str, Runs]]) -> list[dict]:
    """One row for each workload and variant; ratios are of the same run: the first variant's seconds over this one's
    (`speedup`, the median), and this one's over goodput's (`goodput_gain`, the median and where it lies with 95 %)."""
    rows = []
    for workload, by_variant in results.items():
        base = next(iter(by_variant.values()))
        goodput = by_variant.get("goodput")
        for variant, runs in by_variant.items():
            ratios, tails = (
                [b / max(1e-9, s) for b, s in zip(getattr(base, key), getattr(runs, key), strict=True)]
                for key in ("seconds", "tail")
            )
            gains = goodput and [s / max(1e-9, g) for s, g in zip(runs.seconds, goodput.seconds, strict=True)]
            rows.append(
                {
                    "workload": workload,
                    "variant": variant,
                    "seconds": round(float(np.median(runs.seconds)), 3),
                    "speedup": round(float(np.median(ratios)), 3),
                    "tail_speedup": round(float(np.median(tails)), 3) if any(base.tail) else None,
                    "range": [round(min(ratios), 3), round(max(ratios), 3)],
                    "goodput_gain": median_interval(gains) if gains else None,
                    "drafted": runs.drafted,
                    "accepted": runs.accepted,
                    "on_share": round(runs.on_share, 3),
                }
            )
    return rows


def as_text(rows: list[dict]) -> str:
    lines = [
        f"{'workload':10} {'variant':13} {'seconds':>8} {'speed-up':>9} {'(range)':>14} {'tail':>6} drafted accepted "
        "its seconds over goodput's (95 %)"
    ]
    for row in rows:
        low, high = row["range"]
        tail = f"{row['tail_speedup']:.2f}" if row["tail_speedup"] else ""
        gain = "{:.3f} ({:.3f}-{:.3f})".format(*row["goodput_gain"]) if row["goodput_gain"] else ""
        lines.append(
            f"{row['workload']:10} {row['variant']:13} {row['seconds']:8.2f} {row['speedup']:9.3f} "
            f"({low:.3f}-{high:.3f}) {tail:>6} {row['drafted']:7} {row['accepted']:8} {gain:>19}".rstrip()
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipe.switch_bench", description=__doc__.splitlines()[0])
    parser.add_argument("--assets", type=Path, default=Path("outputs/tiny_assets"), help="of recipe.tiny.assets")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="all that are installed by default")
    parser.add_argument("--repeats", type=int, default=5, help="runs that count")
    parser.add_argument("--draft-tokens", type=int, default=8, help="longest draft, of all variants")
    parser.add_argument("--prompts", type=int, default=12, help="of a round")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--plot", type=Path, help="picture of the rows")
    options = parser.parse_args(arguments)
    if not (options.assets / "model" / "config.json").is_file():
        print(f"error: {options.assets}: no tiny model; build it with python -m recipe.tiny.assets", file=sys.stderr)
        return 2
    for name, value in {**OFFLINE, **CPU, "VLLM_LOGGING_LEVEL": "ERROR"}.items():
        os.environ.setdefault(name, value)
    from recipe.versions import installed

    variants = options.variants or [v for v in VARIANTS if v != "suffix" or installed("arctic-inference")]
    work = make_work(options.assets, options.prompts, options.samples)
    chosen = {name: work[name] for name in options.workloads}
    rows = table(compare(options.assets, chosen, tuple(variants), options.repeats, options.draft_tokens))
    print(as_text(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.plot:
        from recipe.switch_plot import plot

        plot(rows, f"medians and ranges of {options.repeats} runs, {date.today()}", options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
