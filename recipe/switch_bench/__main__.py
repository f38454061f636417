"""`python -m recipe.switch_bench`: every policy and every baseline on the same work, at the same time, on this machine.

Five workloads: `rollout`, a round of the tiny task as the quickstart generates it; `bulk`, a batch in which nobody
finishes before the others; `single`, one long request; `random`, text that never repeats, which no drafter can win on;
`random few`, the same with a few requests, where a step is short and what a drafter costs weighs most.

Each variant has an engine of its own in this process. They run side by side, a twentieth of a second each in turn, so
that whatever else the machine does falls on all alike. An engine can be a percent slower than the next for as long as
it lives: the policies change engines from run to run, and the engines their order. Sampling is exact: every run of a
workload must give the same tokens, so the seconds are of the same work.
"""

import argparse
import gc
import json
import os
import random
import sys
import time
from datetime import date
from pathlib import Path

from recipe.launch.environment import CPU, OFFLINE
from recipe.launch.versions import installed
from recipe.switch_bench.table import Runs, as_text, plot, table
from sam.bench.prompts import read_prompts

WORKLOADS = ("rollout", "bulk", "single", "random", "random few")
THRESHOLDS = (4, 8, 16, 32, 64)
VARIANTS = ("off", *(f"threshold {n}" for n in THRESHOLDS), "always", "goodput", "ngram", "suffix")
TAIL_REQUESTS = 64  # as configs/dapo_tiny_cpu.yaml
FEW_REQUESTS = 12
SLICE_SECONDS = 0.05
KV_CACHE_SHARE = 0.03  # of the memory, for each engine


# Requests that start together: each one's prompt and keywords of SamplingParams.
Work = list[tuple[list[int], dict]]


def make_work(assets: Path, prompts: int, samples: int) -> dict[str, Work]:
    """The workloads; `prompts` and `samples` are a round's."""
    texts = read_prompts(assets / "train.parquet", assets / "model", prompts)
    grouped = [text for text in texts for _ in range(samples)]

    def work(prompts: list[list[int]], **keywords) -> Work:
        common = {"temperature": 1.0, "detokenize": False, "logprobs": 0, **keywords}
        return [(prompt, {**common, "seed": seed}) for seed, prompt in enumerate(prompts)]

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

        from recipe.launch.config import compose_config
        from sam.config import SpeculationConfig

        self.variant = variant
        method = variant if variant in ("off", "ngram", "suffix") else "sam"
        config = compose_config("dapo_tiny_cpu", [f"speculation={method}", f"assets={assets}"])
        policy, _, threshold = variant.partition(" ")
        section = {**config.speculation, "num_speculative_tokens": draft_tokens}
        if method == "sam":
            section |= {"policy": policy, "batch_size_threshold": int(threshold or 0)}
        rollout = config.actor_rollout_ref.rollout
        limits = ("dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens")
        self.llm = LLM(
            str(assets / "model"),
            **{name: rollout[name] for name in limits},
            gpu_memory_utilization=KV_CACHE_SHARE,
            enforce_eager=True,
            **SpeculationConfig.from_dict(section).vllm_arguments(),
        )
        from sam.vllm.step_recorder import StepRecorder

        core = self.llm.llm_engine.engine_core.engine_core
        self.runner = core.model_executor.driver_worker.worker.model_runner
        self.recorder = StepRecorder.attach(self.runner)
        self.policy = self.runner.drafter.policy if method == "sam" else None

    def _renew_drafter(self) -> None:
        """Forget the responses of earlier runs, which are those of this one; keep what goodput knows of step costs."""
        if self.variant not in ("off", "ngram"):
            self.runner.drafter = proposer = type(self.runner.drafter)(self.runner.vllm_config)
            if self.variant != "suffix":
                proposer.bind(self.runner)
                proposer.policy, self.policy.counters = self.policy, proposer.counters

    def begin(self, work: Work) -> None:
        """Start a run: forget earlier ones and queue all requests."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._renew_drafter()
        self.llm.reset_prefix_cache()
        self.recorder.take()
        self.tokens: dict[str, tuple[int, ...]] = {}
        self.seconds = self.tail = 0.0
        started = time.perf_counter()
        for i, (prompt, keywords) in enumerate(work):
            sampling = SamplingParams(**keywords, output_kind=RequestOutputKind.FINAL_ONLY)
            self.llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, sampling)
        self.paused = time.perf_counter()
        self.seconds += self.paused - started

    def advance(self) -> bool:
        """Run for a slice; False when nothing is left."""
        engine = self.llm.llm_engine
        began = now = time.perf_counter()
        if self.policy is not None:
            self.runner.drafter.exclude_idle(began - self.paused)
        while now - began < SLICE_SECONDS and (left := engine.get_num_unfinished_requests()):
            step = now
            for output in engine.step():
                self.tokens[output.request_id] = tuple(output.outputs[0].token_ids)
            now = time.perf_counter()
            self.tail += (now - step) * (left <= TAIL_REQUESTS)
        self.seconds += now - began
        self.paused = now
        return engine.has_unfinished_requests()

    def end(self, runs: Runs) -> dict[str, tuple[int, ...]]:
        """Add the run's results to `runs`; returns its tokens by request."""
        runs.seconds.append(self.seconds)
        runs.tail.append(self.tail)
        steps = self.recorder.take()
        runs.drafted, runs.accepted = int(steps.drafted.sum()), int(steps.accepted.sum())
        runs.on_share = float((steps.drafted > 0).mean())
        if getattr(getattr(self.runner, "drafter", None), "counters", {}).get("draft_errors"):
            raise RuntimeError(f"{self.variant}: drafting failed, see the log")
        return self.tokens


def shuffle(engines: list[Engine], seed: int) -> None:
    """Shuffle the engines' order, and the policies among the engines that differ in nothing but their policy."""
    rng = random.Random(seed)
    rng.shuffle(engines)
    alike = [engine for engine in engines if engine.policy is not None]
    policies = [(engine.variant, engine.policy) for engine in alike]
    rng.shuffle(policies)
    for engine, (variant, policy) in zip(alike, policies, strict=True):
        engine.variant, engine.policy = variant, policy


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
                shuffle(engines, repeat)
                run_side_by_side(engines, work, runs)
                bar.update()
    return results


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
    variants = options.variants or [v for v in VARIANTS if v != "suffix" or installed("arctic-inference")]
    work = make_work(options.assets, options.prompts, options.samples)
    chosen = {name: work[name] for name in options.workloads}
    rows = table(compare(options.assets, chosen, tuple(variants), options.repeats, options.draft_tokens))
    print(as_text(rows))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.plot:
        plot(rows, f"medians and ranges of {options.repeats} runs, {date.today()}", options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
