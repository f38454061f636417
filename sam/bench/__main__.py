"""`python -m sam.bench --model DIR`: does speculation pay for this model, engine and load, compared with stock vLLM?

Each variant has an engine in a process of its own; they take turns on the same requests, round by round. `stock` is
vLLM as it is shipped, without this project's plugin. Words that are not below are arguments of vLLM's engine, by
vLLM's own names, such as --max-model-len 2048 or --enforce-eager, and go to all variants.
"""

import argparse
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sam.bench.arguments import parse
from sam.bench.engine_process import EngineProcess, stop_all
from sam.bench.environment import MEMORY, environment_of, vllm_version
from sam.bench.loads import Group, check_prompts, groups_before
from sam.bench.prompts import BUILT_IN, check_draft_model, check_texts, digest, model_config, read_prompts, tokenizer_of
from sam.bench.recording import read_groups
from sam.bench.report import bench_page
from sam.bench.rounds import RoundsFile, emit_history, measure, missing
from sam.bench.settings import STOCK, Settings
from sam.bench.table import as_text, batches_in_words, recommendation, rows_of, verdicts_of, warnings_of
from sam.command import run_command
from sam.record.atomic import replacing

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
DEFAULT_MAX_TOKENS = 256
INTERRUPTED = 130  # exit code, as a shell has it for Ctrl-C
STOCK_SAMPLES = (
    "stock samples with vLLM's own generators: other tokens of the same distribution, unless T is 0; on a CPU seeds "
    "slow it down: compare with --no-seeds too"
)


def prepare(options: argparse.Namespace, engine: list[str]) -> tuple[Settings, list[Group], list[str]]:
    """Settings, groups and what to know of these, checked: all that can be wrong without an engine.

    Raises:
        ValueError: one line.
    """
    names = ("samples", "responses", "temperature", "draft_tokens", "ignore_eos", "requests", "variants")
    of_cpu = vllm_version().endswith("+cpu")
    config, tokenizer = model_config(options.model), tokenizer_of(options.model, engine)
    seeds = options.text is None if options.seeds is None else options.seeds
    common = {name: getattr(options, name) for name in names} | {"engine": engine, "seeds": seeds}
    longest = DEFAULT_MAX_TOKENS if options.max_tokens is None else options.max_tokens
    if options.draft_model is not None:
        common["draft_model"] = str(options.draft_model.resolve())
    Settings(model="", prompts="", max_tokens=longest, **common)  # before prompts are read, which takes longer
    if options.draft_model is not None:
        check_draft_model(options.draft_model, config, options.variants)
    groups, name, notes = read_input(options, tokenizer)
    if of_cpu and any(Path("/dev").glob("nvidia[0-9]*")):
        notes.append("this vLLM is built for CPUs, and the machine has a GPU: bash scripts/bench_cuda.sh measures that")
    source = str(options.text or options.prompts or BUILT_IN)
    check_prompts(options.requests, options.samples, len(groups), source)
    check_texts(groups, longest, config, engine, source)
    if options.text:
        longest = max(len(response) for group in groups for response in group.responses)
        common |= {"text": options.text.resolve().name, "ignore_eos": True}
        common |= {"history": options.history and options.history.resolve().name}
    common |= {"max_tokens": longest, "has_tokenizer": tokenizer is not None}
    return Settings(model=str(options.model.resolve()), prompts=name, **common), groups, notes


def read_input(options: argparse.Namespace, tokenizer: Path | None) -> tuple[list[Group], str, list[str]]:
    """Groups, their name, and what to know of them."""
    needed = groups_before(options.requests, options.samples, options.responses, options.rounds + 1)
    notes: list[str] = []
    if options.text:
        folder = None if tokenizer is None else str(tokenizer)
        groups, notes = read_groups(options.text, folder, options.requests, options.samples, options.max_tokens)
    else:
        most = None if options.prompts else needed
        groups = [Group(prompt) for prompt in read_prompts(options.prompts, tokenizer, most)]
    if options.history and len(groups) < needed:
        raise ValueError(f"--history: {options.text} has {len(groups)} groups, {needed} are needed: set --rounds lower")
    if len(groups) < needed:
        name, again = options.text or options.prompts, "some come again, to drafters that have been told to forget"
        notes.append(f"{name} has {len(groups)} prompts or groups, all rounds need {needed}: {again}")
    # Built-in prompts are as many as rounds need: more rounds are no other measurement.
    return groups, digest(groups) if options.text or options.prompts else BUILT_IN, notes


def history_of(options: argparse.Namespace, engine: list[str]) -> list[Group]:
    """The groups of `--history`, as those of `--text` are read."""
    if not options.history:
        return []
    tokenizer = tokenizer_of(options.model, engine)
    folder = None if tokenizer is None else str(tokenizer)
    return read_groups(options.history, folder, options.requests, options.samples, options.max_tokens)[0]


def run_engines(
    settings: Settings, groups: list[Group], history: list[Group], file: RoundsFile, rounds: int, logs: Path
) -> None:
    """Start an engine for each variant and measure what is missing; none is left running, however this ends.

    Raises:
        EngineError: an engine refused or ended.
    """
    places = missing(file, settings, rounds)
    if not places:
        return
    runs = (len(places) + len({load for _, load in places})) * len(settings.variants)
    engines: dict[str, EngineProcess] = {}
    with tqdm(total=len(settings.variants) + runs, unit="run", disable=None) as bar:

        def advance(what: str) -> None:
            bar.set_description(what)
            bar.update()

        try:
            for variants in [settings.variants] if settings.starts_at_once else [[one] for one in settings.variants]:
                bar.set_description(f"starting {', '.join(variants)}")
                start_engines(variants, settings, groups, logs, engines, bar.update)
            emit_history(engines.values(), settings, history)
            measure(engines, settings, groups, file, rounds, advance)
        finally:
            bar.set_description("ending the engines")
            stop_all(engines.values())


def start_engines(
    variants: list[str],
    settings: Settings,
    groups: list[Group],
    logs: Path,
    engines: dict[str, EngineProcess],
    advance: Callable[[], None],
) -> None:
    """Start the engines of some variants side by side and add them to `engines`.

    Raises:
        EngineError: one refused or ended. ValueError: the prompts are too long for one.
    """
    started = time.perf_counter()
    for variant in variants:
        engine = engines[variant] = EngineProcess(variant, logs / f"{variant}.log", environment_of(variant))
        engine.tell(settings.start(variant, MEMORY in os.environ))
    for variant in variants:
        longest_text = engines[variant].reply()["longest_text"]
        engines[variant].start_s = round(time.perf_counter() - started, 2)
        check_length(groups, settings.max_tokens, longest_text)
        advance()


def check_length(groups: list[Group], max_tokens: int, longest_text: int) -> None:
    """Raise ValueError if a prompt with its response is longer than an engine takes, in tokens."""
    longest = max(group.longest_text(max_tokens) for group in groups)
    if longest > longest_text:
        raise ValueError(
            f"a prompt with its response has up to {longest} tokens, more than the engine takes, {longest_text}: set "
            "--max-tokens or --max-model-len"
        )


def result_of(file: RoundsFile, settings: Settings, notes: list[str]) -> dict[str, Any]:
    """What is measured so far."""
    rows, verdicts = rows_of(file.lines, settings), verdicts_of(file.lines, settings)
    return {
        "date": str(date.today()),
        "vllm": vllm_version(),
        "settings": vars(settings),
        "rows": rows,
        "verdicts": {str(requests): vars(verdict) for requests, verdict in verdicts.items()},
        "lines": [verdict.line(requests) for requests, verdict in verdicts.items()],
        "recommended": recommendation(verdicts, settings),
        "warnings": [*notes, *warnings_of(rows, settings)],
    }


def shown(result: dict[str, Any], settings: Settings) -> str:
    """The result for a reader: rows, what to know of them, the verdicts, and settings to paste."""
    if not result["rows"]:
        return "nothing is measured yet"
    lines = [as_text(result["rows"], settings)]
    lines.append(f"batches of a round, one after another: {batches_in_words(settings)}")
    lines.append("all requests carry seeds" if settings.seeds else "no request carries a seed")
    if settings.text:
        lines.append(f"all requests emit the responses of {settings.text}, whatever the logits say")
    elif STOCK in settings.variants and settings.seeds:
        lines.append(STOCK_SAMPLES)
    lines += [f"warning: {warning}" for warning in result["warnings"]]
    if settings.reference != STOCK:
        lines.append("compared with off, not with stock vLLM")
    if not HAS_MATPLOTLIB:
        lines.append("no page: matplotlib is not installed")
    return "\n".join([*lines, *result["lines"], result["recommended"]]).rstrip()


def write(result: dict[str, Any], settings: Settings, file: RoundsFile, tokenizer: Path | None, output: Path) -> None:
    """result.json and, where there is something to draw and matplotlib to draw it, bench.html."""
    with replacing(output / "result.json") as partial:
        partial.write_text(json.dumps(result, indent=1) + "\n")
    if result["rows"] and HAS_MATPLOTLIB:
        places = [(load, variant) for load in settings.requests for variant in settings.variants]
        recorded = {place: one for place in places if (one := file.recorded(*place)) is not None}
        with replacing(output / "bench.html") as partial:
            partial.write_text(bench_page(result, settings, recorded, tokenizer))


def main(arguments: list[str] | None = None) -> int:
    interrupted = False

    def bench() -> str:
        nonlocal interrupted
        options, engine = parse(arguments)
        settings, groups, notes = prepare(options, engine)
        options.output.mkdir(parents=True, exist_ok=True)
        file = RoundsFile(options.output / "rounds.jsonl", settings, options.resume)
        try:
            run_engines(settings, groups, history_of(options, engine), file, options.rounds, options.output)
        except KeyboardInterrupt:
            interrupted = True
        result = result_of(file, settings, notes)
        write(result, settings, file, tokenizer_of(options.model, engine), options.output)
        going_on = "\ninterrupted: go on with the same command and --resume" if interrupted else ""
        return json.dumps(result) if options.json else shown(result, settings) + going_on

    return run_command(bench, errors=(ValueError, OSError, RuntimeError)) or INTERRUPTED * interrupted


if __name__ == "__main__":
    sys.exit(main())
