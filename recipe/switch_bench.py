"""`python -m recipe.switch_bench`: every policy and every peer on the same work, interleaved, on this machine.

Four workloads: `rollout`, a round of the tiny task as the quickstart generates it; `bulk`, a batch in which nobody
finishes before the others; `single`, one long request; `random`, text that never repeats, which no drafter can win on.
All engines live in this process and take turns, so that what else the machine does falls on all alike. Sampling is
exact: every run of a workload must give the same tokens, so the seconds are of the same work.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from recipe.environment import CPU, OFFLINE
from recipe.report_data import in_tail

WORKLOADS = ("rollout", "bulk", "single", "random")
THRESHOLDS = (4, 8, 16, 32, 64)
VARIANTS = ("off", *(f"threshold {n}" for n in THRESHOLDS), "always", "goodput", "ngram", "suffix")
TAIL_REQUESTS = 64  # as configs/dapo_tiny_cpu.yaml


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
    """The four workloads; `prompts` and `samples` are a round's."""
    import pandas
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    rows = pandas.read_parquet(assets / "train.parquet")["prompt"].head(prompts)
    texts = [tokenizer.apply_chat_template(list(map(dict, row)), add_generation_prompt=True) for row in rows]
    texts = [list(text["input_ids"] if hasattr(text, "keys") else text) for text in texts]
    grouped = [text for text in texts for _ in range(samples)]

    def sampling(count: int, **keywords) -> list[dict]:
        common = {"temperature": 1.0, "detokenize": False, "logprobs": 0}
        return [{**common, **keywords, "seed": seed} for seed in range(count)]

    # At this temperature all tokens are about as likely.
    return {
        "rollout": Work(grouped, sampling(len(grouped), max_tokens=512)),
        "bulk": Work(grouped, sampling(len(grouped), max_tokens=160, ignore_eos=True)),
        "single": Work(texts[:1], sampling(1, max_tokens=500, ignore_eos=True)),
        "random": Work(grouped, sampling(len(grouped), max_tokens=160, ignore_eos=True, temperature=1000.0)),
    }


class Engine:
    """One vLLM engine in this process, with a drafter that starts anew in every run."""

    def __init__(self, assets: Path, method: str, draft_tokens: int):
        from vllm import LLM

        from recipe.configuration import compose_config
        from recipe.speculation import Speculation

        config = compose_config("dapo_tiny_cpu", [f"speculation={method}", f"assets={assets}"])
        section = {**config.speculation, "num_speculative_tokens": draft_tokens}
        rollout = config.actor_rollout_ref.rollout
        self.llm = LLM(
            str(assets / "model"),
            dtype=rollout.dtype,
            max_model_len=rollout.max_model_len,
            max_num_seqs=rollout.max_num_seqs,
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            gpu_memory_utilization=rollout.gpu_memory_utilization,
            enforce_eager=True,
            **Speculation.from_config(section).vllm_arguments(),
        )
        from sam.vllm.metrics import StepRecorder

        core = self.llm.llm_engine.engine_core.engine_core
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.recorder = StepRecorder.attach(self.runner)
        self.goodput = getattr(getattr(self.runner, "drafter", None), "policy", None)

    def renew_drafter(self, variant: str) -> None:
        """Forget the responses of earlier runs, which are those of this one; keep what goodput knows of step costs."""
        if variant == "off" or variant == "ngram":
            return
        proposer = type(self.runner.drafter)(self.runner.vllm_config)
        if variant != "suffix":
            from sam.switch import make_policy

            proposer.bind(self.runner)
            name, _, threshold = variant.partition(" ")
            k = proposer.num_speculative_tokens
            policy = self.goodput if name == "goodput" else make_policy(name, k, int(threshold or 0))
            proposer.policy, policy.counters = policy, proposer.counters
        self.runner.drafter = proposer

    def run(self, variant: str, work: Work, runs: Runs) -> list[tuple[int, ...]]:
        from vllm import SamplingParams

        self.renew_drafter(variant)
        self.llm.reset_prefix_cache()
        self.recorder.take()
        parameters = [SamplingParams(**keywords) for keywords in work.sampling]
        prompts = [{"prompt_token_ids": prompt} for prompt in work.prompts]
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, parameters, use_tqdm=False)
        runs.seconds.append(time.perf_counter() - started)
        steps = self.recorder.take()
        runs.tail.append(float(steps["step_ms"][in_tail(steps["running"], TAIL_REQUESTS)].sum()) / 1e3)
        runs.drafted, runs.accepted = int(steps["drafted"].sum()), int(steps["accepted"].sum())
        runs.on_share = float((steps["drafted"] > 0).mean())
        if getattr(getattr(self.runner, "drafter", None), "counters", {}).get("faults"):
            raise RuntimeError(f"{variant}: drafting failed, see the log")
        return [output.outputs[0].token_ids for output in outputs]


def engine_of(variant: str) -> str:
    return variant if variant in ("off", "ngram", "suffix") else "sam"


def compare(
    assets: Path, workloads: dict[str, Work], variants: tuple[str, ...], repeats: int, draft_tokens: int
) -> dict[str, dict[str, Runs]]:
    """Runs by workload and variant; the first run of each is a warm-up and does not count.

    Raises:
        RuntimeError: two variants gave different tokens.
    """
    from tqdm import tqdm

    engines = {method: Engine(assets, method, draft_tokens) for method in dict.fromkeys(map(engine_of, variants))}
    results = {name: {variant: Runs() for variant in variants} for name in workloads}
    with tqdm(total=len(workloads) * (repeats + 1) * len(variants), unit="run", disable=None) as bar:
        for name, work in workloads.items():
            tokens = None
            for repeat in range(repeats + 1):
                # Another one begins each time: none always follows the same neighbour.
                for variant in variants[repeat % len(variants) :] + variants[: repeat % len(variants)]:
                    bar.set_description(f"{name}, {variant}")
                    runs = results[name][variant] if repeat else Runs()
                    found = engines[engine_of(variant)].run(variant, work, runs)
                    if tokens is not None and found != tokens:
                        raise RuntimeError(f"{name}: {variant} gave other tokens than the others")
                    tokens = found
                    bar.update()
    return results


def table(results: dict[str, dict[str, Runs]]) -> list[dict]:
    """One row for each workload and variant; ratios are medians of off's seconds over the variant's, run by run."""
    rows = []
    for workload, by_variant in results.items():
        base = by_variant.get("off") or next(iter(by_variant.values()))
        for variant, runs in by_variant.items():
            ratios, tails = (
                [b / max(1e-9, s) for b, s in zip(getattr(base, key), getattr(runs, key), strict=True)]
                for key in ("seconds", "tail")
            )
            rows.append(
                {
                    "workload": workload,
                    "variant": variant,
                    "seconds": round(float(np.median(runs.seconds)), 3),
                    "speedup": round(float(np.median(ratios)), 3),
                    "tail_speedup": round(float(np.median(tails)), 3) if any(base.tail) else None,
                    "range": [round(min(ratios), 3), round(max(ratios), 3)],
                    "drafted": runs.drafted,
                    "accepted": runs.accepted,
                    "on_share": round(runs.on_share, 3),
                }
            )
    return rows


def as_text(rows: list[dict]) -> str:
    lines = [
        f"{'workload':9} {'variant':13} {'seconds':>8} {'speed-up':>9} {'(range)':>14} {'tail':>6} drafted accepted"
    ]
    for row in rows:
        low, high = row["range"]
        tail = f"{row['tail_speedup']:.2f}" if row["tail_speedup"] else ""
        lines.append(
            f"{row['workload']:9} {row['variant']:13} {row['seconds']:8.2f} {row['speedup']:9.3f} "
            f"({low:.3f}-{high:.3f}) {tail:>6} {row['drafted']:7} {row['accepted']:8}"
        )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m recipe.switch_bench", description=__doc__.splitlines()[0])
    parser.add_argument("--assets", type=Path, default=Path("outputs/tiny_assets"), help="of recipe.tiny.assets")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="all that are installed by default")
    parser.add_argument("--repeats", type=int, default=3, help="runs that count")
    parser.add_argument("--draft-tokens", type=int, default=8, help="longest draft, of all variants")
    parser.add_argument("--prompts", type=int, default=12, help="of a round")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--json", type=Path, help="file for the rows")
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
