"""`python -m sam.bench --model DIR`: does speculation pay for this model, engine and load, compared with stock vLLM?

Each variant has an engine in a process of its own; they take turns on the same requests, round by round. `stock` is
vLLM as it is shipped, without this project's plugin. Words that are not this command's options are arguments of vLLM's
engine, by vLLM's own names, such as --max-model-len 2048 or --enforce-eager, and go to all variants.
"""

import importlib.util
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from sam.bench.result import as_page, as_text, result_of
from sam.bench.rounds import Engines, RoundsFile
from sam.bench.settings import DEFAULT_MAX_TOKENS, Settings, engine_arguments, parse
from sam.command import run_command
from sam.record.atomic import replacing

INTERRUPTED = 130  # exit code, as a shell has it for Ctrl-C
MEMORY_ARGUMENTS = {"gpu_memory_utilization", "kv_cache_memory_bytes"}
MEMORY_SHARE = 0.6  # of the memory for all engines together: they stay up, beside what else the machine runs


def prepare(settings: Settings) -> tuple[Settings, list[Group], list[str]]:
    """Whole settings, groups and what to know of these, checked: all that can be wrong without an engine.

    Raises:
        ValueError: one line.
    """
    of_cpu, vocabulary = vllm_version().endswith("+cpu"), vocabulary_of(settings.model)
    if "suffix" in " ".join(settings.variants) and importlib.util.find_spec("arctic_inference") is None:
        raise ValueError("--variants suffix: it needs arctic-inference: install the extra `peers`, or leave it out")
    if settings.draft_model is not None:
        check_draft_model(settings.draft_model, vocabulary, settings.trained)
    tokenizer = tokenizer_of(settings.model, settings.engine)
    if settings.text is None and settings.max_tokens is None:
        settings = replace(settings, max_tokens=DEFAULT_MAX_TOKENS)
    groups, notes = read_input(settings, tokenizer)
    check_tokens(groups, vocabulary, str(settings.text or settings.prompts or BUILT_IN))
    if of_cpu and any(Path("/dev").glob("nvidia[0-9]*")):
        notes.append("this vLLM is built for CPUs, and the machine has a GPU: bash scripts/bench_cuda.sh measures that")
    engine, given = list(settings.engine), engine_arguments(settings.engine)
    if MEMORY not in os.environ and not given.keys() & MEMORY_ARGUMENTS:
        engine += ["--gpu-memory-utilization", str(round(MEMORY_SHARE / len(settings.variants), 3))]
    if tokenizer is None and "skip_tokenizer_init" not in given:
        engine.append("--skip-tokenizer-init")
    longest = max((len(text) for group in groups for text in group.responses or []), default=settings.max_tokens)
    return replace(settings, max_tokens=longest, engine=engine), groups, notes


def read_input(settings: Settings, tokenizer: Path | None) -> tuple[list[Group], list[str]]:
    """Groups, and what to know of them."""
    needed = groups_before(settings, settings.rounds + 1)
    if not settings.text:
        prompts = read_prompts(settings.prompts, tokenizer, None if settings.prompts else needed)
        if len(prompts) < needed:
            raise ValueError(
                f"{settings.prompts}: {len(prompts)} prompts, all rounds need {needed}, so that none comes again: give "
                "more, or lower --rounds, --responses or --requests"
            )
        return [Group(prompt) for prompt in prompts], []
    size = max(group_sizes(max(settings.requests), settings.samples))
    groups, notes = read_groups(settings.text, tokenizer, size, settings.max_tokens)
    if len(groups) < needed:
        again = f"{settings.text} has {len(groups)} groups, all rounds need {needed}: they come again in other tokens"
        notes.append(f"{again}, which a trained drafter has not learnt: lower --rounds" if settings.trained else again)
    return groups, notes


def measure(arguments: list[str] | None) -> tuple[dict[str, Any], int]:
    """What `main` does without a screen; returns result.json's content and the exit code.

    Raises:
        ValueError: bad input. EngineError: the engine with which the others are compared refused or ended.
    """
    settings, groups, notes = prepare(parse(arguments))
    # Built-in prompts are as many as rounds need: more rounds are no other measurement.
    file = RoundsFile(settings, digest(groups) if settings.text or settings.prompts else BUILT_IN)
    engines, code = Engines(settings, groups), 0
    try:
        engines.measure(file)
    except KeyboardInterrupt:
        code = INTERRUPTED
    for fault in engines.faults.values():
        code = code or 2
        print(f"error: {fault}", file=sys.stderr)
        notes.append(f"left out: {fault}")
    result = result_of(file.lines.values(), settings, notes, vllm_version())
    with replacing(settings.output / "result.json") as partial:
        partial.write_text(json.dumps(result, indent=1) + "\n")
    if result["rows"]:
        with replacing(settings.output / "bench.html") as partial:
            partial.write_text(as_page(result))
    return result, code


def main(arguments: list[str] | None = None) -> int:
    code = 0

    def bench() -> str:
        nonlocal code
        result, code = measure(arguments)
        going_on = "\ninterrupted: go on with the same command and --resume" if code == INTERRUPTED else ""
        return as_text(result) + going_on

    return run_command(bench, errors=(ValueError, OSError, RuntimeError)) or code


if __name__ == "__main__":
    sys.exit(main())
