"""`python -m sam.bench --model DIR`: does speculation pay for this model, engine and load, compared with stock vLLM?

Each variant has an engine in a process of its own; they take turns on the same requests, round by round. `stock` is
vLLM as it is shipped, without this project's plugin. Words that are not this command's options are arguments of vLLM's
engine, by vLLM's own names, such as --max-model-len 2048 or --enforce-eager, and go to all variants.
"""

import argparse
import importlib.util
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sam.bench.environment import MEMORY, vllm_version
from sam.bench.loads import group_sizes, groups_before
from sam.bench.prompts import (
    BUILT_IN,
    Group,
    check_draft_model,
    check_tokens,
    digest,
    read_groups,
    read_prompts,
    tokenizer_of,
    vocabulary_of,
)
from sam.bench.report import as_page, as_text, result_of
from sam.bench.rounds import Engines, RoundsFile
from sam.bench.settings import MEMORY_ARGUMENTS, Settings, engine_arguments, parse
from sam.command import run_command
from sam.config import WITH_DRAFT_MODEL
from sam.record.atomic import replacing

INTERRUPTED = 130  # exit code, as a shell has it for Ctrl-C
MEMORY_SHARE = 0.6  # of the memory for all engines together: they stay up, beside what else the machine runs


def prepare(options: argparse.Namespace, settings: Settings) -> tuple[Settings, list[Group], list[str]]:
    """Whole settings, groups and what to know of these, checked: all that can be wrong without an engine.

    Raises:
        ValueError: one line.
    """
    of_cpu, vocabulary = vllm_version().endswith("+cpu"), vocabulary_of(options.model)
    if "suffix" in " ".join(settings.variants) and importlib.util.find_spec("arctic_inference") is None:
        raise ValueError("--variants suffix: it needs arctic-inference: install the extra `peers`, or leave it out")
    if options.draft_model is not None:
        check_draft_model(options.draft_model, vocabulary, settings.variants)
    tokenizer = tokenizer_of(options.model, settings.engine)
    groups, notes = read_input(options, settings, tokenizer)
    source = options.text or options.prompts
    check_tokens(groups, vocabulary, str(source or BUILT_IN))
    if of_cpu and any(Path("/dev").glob("nvidia[0-9]*")):
        notes.append("this vLLM is built for CPUs, and the machine has a GPU: bash scripts/bench_cuda.sh measures that")
    engine, given = list(settings.engine), engine_arguments(settings.engine)
    if MEMORY not in os.environ and not given.keys() & {*MEMORY_ARGUMENTS}:
        engine += ["--gpu-memory-utilization", str(round(MEMORY_SHARE / len(settings.variants), 3))]
    if tokenizer is None and "skip_tokenizer_init" not in given:
        engine.append("--skip-tokenizer-init")
    longest = settings.max_tokens
    if options.text:
        longest = max(len(response) for group in groups for response in group.responses)
    # Built-in prompts are as many as rounds need: more rounds are no other measurement.
    name = digest(groups) if source else BUILT_IN
    return replace(settings, prompts=name, max_tokens=longest, engine=engine), groups, notes


def read_input(
    options: argparse.Namespace, settings: Settings, tokenizer: Path | None
) -> tuple[list[Group], list[str]]:
    """Groups, and what to know of them."""
    needed = groups_before(settings, options.rounds + 1)
    if not options.text:
        prompts = read_prompts(options.prompts, tokenizer, None if options.prompts else needed)
        if len(prompts) < needed:
            raise ValueError(
                f"{options.prompts}: {len(prompts)} prompts, all rounds need {needed}, so that none comes again: give "
                "more, or lower --rounds, --responses or --requests"
            )
        return [Group(prompt) for prompt in prompts], []
    size = max(group_sizes(max(settings.requests), settings.samples))
    groups, notes = read_groups(options.text, tokenizer, size, options.max_tokens)
    if len(groups) < needed:
        again = f"{options.text} has {len(groups)} groups, all rounds need {needed}: they come again in other tokens"
        trained = any(variant in WITH_DRAFT_MODEL for variant in settings.variants)
        notes.append(f"{again}, which a trained drafter has not learnt: lower --rounds" if trained else again)
    return groups, notes


def run_engines(
    settings: Settings, groups: list[Group], file: RoundsFile, options: argparse.Namespace
) -> dict[str, str]:
    """Measure what is missing; returns the faults of the variants that could not be, by variant.

    Raises:
        EngineError: the engine with which the others are compared refused or ended.
    """
    if not (places := file.missing(options.rounds, settings.variants)):
        return {}
    runs = 1 + len(places) + len({load for _, load in places})
    with tqdm(total=len(settings.variants) * runs, unit="run", disable=None) as bar:

        def advance(what: str) -> None:
            bar.set_description(what)
            bar.update()

        bar.set_description("starting engines")
        with Engines(settings, groups, options.output, advance) as engines:
            engines.start()
            engines.measure(file, options.rounds)
            bar.set_description("ending the engines")
        return engines.faults


def write(result: dict[str, Any], settings: Settings, output: Path) -> None:
    """result.json and bench.html."""
    with replacing(output / "result.json") as partial:
        partial.write_text(json.dumps(result, indent=1) + "\n")
    if result["rows"]:
        with replacing(output / "bench.html") as partial:
            partial.write_text(as_page(result, settings))


def main(arguments: list[str] | None = None) -> int:
    code = 0

    def bench() -> str:
        nonlocal code
        settings, groups, notes = prepare(*(given := parse(arguments)))
        options, _ = given
        options.output.mkdir(parents=True, exist_ok=True)
        file = RoundsFile(options.output / "rounds.jsonl", settings, options.resume)
        faults: dict[str, str] = {}
        try:
            faults = run_engines(settings, groups, file, options)
        except KeyboardInterrupt:
            code = INTERRUPTED
        for fault in faults.values():
            code = 2
            print(f"error: {fault}", file=sys.stderr)
            notes.append(f"left out: {fault}")
        result = result_of(file.lines.values(), settings, notes, vllm_version())
        write(result, settings, options.output)
        going_on = "\ninterrupted: go on with the same command and --resume" if code == INTERRUPTED else ""
        return as_text(result, settings) + going_on

    return run_command(bench, errors=(ValueError, OSError, RuntimeError)) or code


if __name__ == "__main__":
    sys.exit(main())
