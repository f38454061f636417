"""The measured rounds as a result: rows with a verdict, warnings and settings to paste, and as text."""

import json
import sys
from collections.abc import Iterable
from datetime import date
from typing import Any

import numpy as np

from sam.command import INTERRUPTED, laid_out
from sam.reading import one_line
from sam.record import replacing
from sam.tools.bench.engines import ROUNDS, EngineError, measure_rounds, prepare, vllm_version
from sam.tools.bench.settings import STOCK, Settings

WORTHWHILE = 1.02  # ratio to stock from which speculation pays; less is not worth a setting
FEWEST_ROUNDS = MORE_ROUNDS = 3  # a range of fewer says nothing about noise
GO = "go"
NO_GO = "no-go"
NOISY = "too noisy to tell"
SAME_WORK = 0.05  # share by which the tokens of two variants may differ before a reader is warned
STOCK_SAMPLES = "stock samples other tokens of the same distribution; on a CPU seeds slow it down: try --no-seeds too"


def measure(settings: Settings) -> tuple[dict[str, Any], int]:
    """Measure; write result.json, of Ctrl-C or an engine that fails what there is, and return its content and the exit
    code.

    Raises:
        ValueError: bad input.
    """
    batches, notes = prepare(settings)
    if vllm_version().endswith("+cpu"):
        from sam.vllm.cpu_fixes import describe  # vLLM

        print(describe(), file=sys.stderr, flush=True)
    loads: list[list[dict[str, dict]]] = [[] for _ in settings.requests]
    try:
        measure_rounds(settings, batches, loads)
        code = 0
    except KeyboardInterrupt:
        code = INTERRUPTED
    except EngineError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    with one_line(str(settings.output / ROUNDS), "not what sam bench writes"):
        result = result_of(loads, settings, notes)
    if any(loads):
        with replacing(settings.output / "result.json") as partial:
            partial.write_text(json.dumps(result, indent=1) + "\n")
    return result, code


def middle(values: Iterable[float], digits: int) -> float:
    """The median, rounded."""
    return round(float(np.median(list(values))), digits)


def compared(seconds: list[float], reference: list[float]) -> dict[str, Any]:
    """`ratio`, `low`, `high`: median and range of the reference's seconds over the others' in the same round; and
    `answer`: GO if the whole range lies above WORTHWHILE, NO_GO if none of it does, otherwise NOISY.

    Example:
        >>> compared([1.0, 1.0, 1.0], [1.31, 1.38, 1.44])
        {'ratio': 1.38, 'low': 1.31, 'high': 1.44, 'answer': 'go'}
    """
    ratios = [theirs / own for own, theirs in zip(seconds, reference, strict=True)]
    low = round(min(ratios), 3)
    high = round(max(ratios), 3)
    if len(seconds) < FEWEST_ROUNDS or low <= WORTHWHILE < high:
        answer = NOISY
    elif low > WORTHWHILE:
        answer = GO
    else:
        answer = NO_GO
    return {"ratio": middle(ratios, 3), "low": low, "high": high, "answer": answer}


def times(compared: dict[str, Any]) -> str:
    """A ratio and its range, for a reader."""
    return "{ratio:.2f}x ({low:.2f}-{high:.2f})".format(**compared)


def at(requests: int) -> str:
    """A load in words."""
    return "at 1 request" if requests == 1 else f"at {requests} requests"


def result_of(loads: list[list[dict[str, dict]]], settings: Settings, notes: list[str]) -> dict[str, Any]:
    """What is measured, as result.json has it.

    Args:
        loads: of each load and round by variant what sam.vllm.bench.engine.BenchEngine.run returns.
        notes: what to know of the input.
    """
    rows = []
    for requests, rounds in zip(settings.requests, loads, strict=True):
        if rounds:
            rows += [row_of(requests, variant, rounds, settings) for variant in settings.variants]
    verdicts = {row["requests"]: row for row in rows if row["variant"] == "sam"}
    return {
        "date": str(date.today()),
        "vllm": vllm_version(),
        "settings": settings.of_measurement(),
        "reference": settings.reference,
        "rows": rows,
        "lines": [verdict_line(row) for row in verdicts.values()],
        "recommended": recommendation({load: row["answer"] for load, row in verdicts.items()}, settings.draft_tokens),
        "warnings": [*notes, *warnings_of(rows, settings)],
    }


def row_of(requests: int, variant: str, rounds: list[dict[str, dict]], settings: Settings) -> dict[str, Any]:
    """One load and variant.

    Returns:
        Medians over the rounds of `seconds`, `tokens_per_s`, `step_ms` (milliseconds of a step) and `steps`;
        `acceptance_length`, `drafted` and `accepted` tokens of all rounds, None for stock; over the reference
        `compared`; `identical` of `responses` that equal those of `off`, None without it or without seeds;
        `tokens_ratio`: its tokens over the reference's; `draft_errors`.
    """
    runs = [by_variant[variant] for by_variant in rounds]
    base = [by_variant[settings.reference] for by_variant in rounds]
    identical = None
    if "off" in settings.variants and (settings.seeds or settings.temperature == 0):
        identical = 0
        for by_variant in rounds:
            pairs = zip(by_variant[variant]["responses"], by_variant["off"]["responses"], strict=True)
            identical += sum(own == theirs for own, theirs in pairs)
    seconds = [run["seconds"] for run in runs]
    return {
        "requests": requests,
        "variant": variant,
        "rounds": len(rounds),
        "seconds": middle(seconds, 3),
        "tokens_per_s": middle((run["tokens"] / run["seconds"] for run in runs), 1),
        "step_ms": middle((1e3 * run["seconds"] / run["steps"] for run in runs), 3),
        "steps": middle((run["steps"] for run in runs), 1),
        "acceptance_length": acceptance_length(runs),
        "drafted": total(runs, "drafted"),
        "accepted": total(runs, "accepted"),
        "draft_errors": total(runs, "draft_errors"),
        **compared(seconds, [run["seconds"] for run in base]),
        "identical": identical,
        "responses": sum(len(run["responses"]) for run in runs),
        "tokens_ratio": round(total(runs, "tokens") / max(1, total(base, "tokens")), 3),
    }


def total(runs: list[dict[str, Any]], name: str) -> int | None:
    """The sum of a count over runs; None where it was not counted, as in stock."""
    counts = [run[name] for run in runs]
    return None if None in counts else sum(counts)


def acceptance_length(runs: list[dict[str, Any]]) -> float | None:
    """Tokens emitted by a verification, of all runs; None where it was not counted, 1.0 where nothing was verified."""
    verify_steps = total(runs, "verify_steps")
    if verify_steps is None:
        return None
    if verify_steps == 0:
        return 1.0
    return round(total(runs, "verified_tokens") / verify_steps, 3)


def verdict_line(row: dict[str, Any]) -> str:
    """The answer about a load in one line.

    Example:
        >>> verdict_line({"requests": 1, "rounds": 3} | compared([1.0, 1.0, 1.0], [0.9, 1.2, 1.1]))
        'too noisy to tell: 1.10x (0.90-1.20) at 1 request: use --rounds 6'
    """
    line = f"{row['answer']}: {times(row)} {at(row['requests'])}"
    if row["answer"] == NOISY:
        line += f": use --rounds {row['rounds'] + MORE_ROUNDS}"
    return line


def recommendation(answers: dict[int, str], draft_tokens: int) -> str:
    """Settings to paste behind a run script of the recipe, and why; by each load's answer."""
    if not answers:
        return ""
    if set(answers.values()) == {NO_GO}:
        return "speculation=off   # no load gains"
    if GO not in answers.values():
        return "no recommendation yet: no load is sure to gain"
    words = f"speculation=sam speculation.policy=goodput speculation.num_speculative_tokens={draft_tokens}"
    doubtful = [str(requests) for requests, answer in answers.items() if answer != GO]
    if not doubtful:
        return words
    return f"{words}   # not sure to gain at {', '.join(doubtful)}"


def warnings_of(rows: list[dict[str, Any]], settings: Settings) -> list[str]:
    """What a reader must know before believing the rows."""
    warnings = []
    if settings.reference == STOCK and settings.seeds and settings.temperature and not settings.text:
        warnings.append(STOCK_SAMPLES)
    for row in rows:
        place = f"{row['variant']} {at(row['requests'])}"
        if row["draft_errors"]:
            warnings.append(f"{place}: drafting failed {row['draft_errors']} times: see {row['variant']}.log")
        if row["variant"] != STOCK and row["identical"] is not None and row["identical"] < row["responses"]:
            warnings.append(f"{place}: {row['responses'] - row['identical']} responses differ from those of off")
        if abs(row["tokens_ratio"] - 1) > SAME_WORK:
            than = f"{row['tokens_ratio']:.2f} times the tokens of {settings.reference}, so that seconds are not"
            warnings.append(f"{place}: {than} of the same work: use --ignore-eos or more rounds")
    return warnings


def table_of(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the table, for the screen and for the report's page."""
    header = ["requests", "variant", "seconds", "tokens/s", "ms/step", "steps", "length", "drafted", "accepted"]
    header += [f"over {result['reference']}", "identical to off"]
    return header, [cells_of(row) for row in result["rows"]]


def cells_of(row: dict[str, Any]) -> list[str]:
    """A row of the table; `-` for what was not counted."""
    return [
        str(row["requests"]),
        row["variant"],
        f"{row['seconds']:.2f}",
        f"{row['tokens_per_s']:.1f}",
        f"{row['step_ms']:.2f}",
        f"{row['steps']:.0f}",
        "-" if row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}",
        "-" if row["drafted"] is None else str(row["drafted"]),
        "-" if row["accepted"] is None else str(row["accepted"]),
        times(row),
        "-" if row["identical"] is None else f"{row['identical']} of {row['responses']}",
    ]


def as_text(result: dict[str, Any]) -> str:
    """The result for a screen: rows, what to know of them, the verdicts, and settings to paste."""
    lines = laid_out(*table_of(result)) if result["rows"] else ["nothing is measured yet"]
    lines += [f"warning: {warning}" for warning in result["warnings"]]
    return "\n".join([*lines, *result["lines"], result["recommended"]]).rstrip()
