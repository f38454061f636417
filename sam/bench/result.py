"""The measured rounds as a result: rows with a verdict, warnings and settings to paste, and as text."""

import json
import math
import sys
from collections.abc import Iterable
from datetime import date
from typing import Any

import numpy as np

from sam.bench.engines import Engines, RoundsFile, prepare, vllm_version
from sam.bench.prompts import BUILT_IN, digest, planned
from sam.bench.settings import STOCK, Settings, is_stock
from sam.command import INTERRUPTED, laid_out
from sam.record import replacing

WORTHWHILE = 1.02  # ratio to stock from which speculation pays; less is not worth a setting
FEWEST_ROUNDS = MORE_ROUNDS = 3  # a range of fewer says nothing about noise
GO, NO_GO, NOISY = "go", "no-go", "too noisy to tell"
SAME_WORK = 0.05  # share by which the tokens of two variants may differ before a reader is warned
STOCK_SAMPLES = (
    "stock samples with vLLM's own generators: other tokens of the same distribution, unless T is 0; on a CPU seeds "
    "slow it down: compare with --no-seeds too"
)


def measure(settings: Settings) -> tuple[dict[str, Any], int]:
    """Measure what is missing; write result.json, and return its content and the exit code.

    Raises:
        ValueError: bad input. EngineError: the engine with which the others are compared refused or ended.
    """
    groups, notes = prepare(settings)
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
    result = result_of(list(file.lines.values()), settings, notes)
    with replacing(settings.output / "result.json") as partial:
        partial.write_text(json.dumps(result, indent=1) + "\n")
    return result, code


def middle(values: Iterable[float], digits: int) -> float:
    """The median, rounded."""
    return round(float(np.median(list(values))), digits)


def median_interval(values: list[float]) -> list[float]:
    """Median, and the narrowest two values around it between which the true median lies with 95 %: the range, up to
    eight values (order statistics: Conover, Practical Nonparametric Statistics, chapter 3.2)."""
    count, outside, beyond = len(values), 0, 0.0
    while (beyond := beyond + math.comb(count, outside) / 2**count) <= 0.025:
        outside += 1
    ordered, outside = sorted(values), max(0, outside - 1)
    return [round(float(v), 3) for v in (np.median(values), ordered[outside], ordered[count - 1 - outside])]


def compared(seconds: list[float], reference: list[float]) -> dict[str, Any]:
    """`ratio`, `low`, `high`: of the reference's seconds over the others' in the same round, as `median_interval`; and
    `answer`: GO if the whole interval lies above WORTHWHILE, NO_GO if none of it does, otherwise NOISY.

    Example:
        >>> compared([1.0, 1.0, 1.0], [1.31, 1.38, 1.44])
        {'ratio': 1.38, 'low': 1.31, 'high': 1.44, 'answer': 'go'}
    """
    ratio, low, high = median_interval([theirs / its for its, theirs in zip(seconds, reference, strict=True)])
    answer = NOISY if len(seconds) < FEWEST_ROUNDS or low <= WORTHWHILE < high else GO if low > WORTHWHILE else NO_GO
    return {"ratio": ratio, "low": low, "high": high, "answer": answer}


def times(compared: dict[str, Any]) -> str:
    """A ratio and its range, for a reader."""
    return "{ratio:.2f}x ({low:.2f}-{high:.2f})".format(**compared)


def in_requests(count: int) -> str:
    """A load in words."""
    return "1 request" if count == 1 else f"{count} requests"


def result_of(lines: list[dict[str, Any]], settings: Settings, notes: list[str]) -> dict[str, Any]:
    """What is measured so far, as result.json has it; `lines` of RoundsFile, `notes`: what to know of the input."""
    rows = []
    for load, requests in enumerate(settings.requests):
        rounds = [line["runs"] for line in lines if line["load"] == load]
        for variant in settings.variants:
            if its_rounds := [runs for runs in rounds if variant in runs]:
                rows.append(row_of(requests, variant, its_rounds, settings))
    verdicts = {row["requests"]: row for row in rows if row["variant"] == "sam"}
    return {
        "date": str(date.today()),
        "vllm": vllm_version(),
        "settings": settings.of_measurement(),
        "measured": what_was_measured(settings),
        "reference": settings.reference,
        "rows": rows,
        "lines": [verdict_line(row) for row in verdicts.values()],
        "recommended": recommendation({load: row["answer"] for load, row in verdicts.items()}, settings.draft_tokens),
        "warnings": [*notes, *warnings_of(rows, settings)],
    }


def row_of(requests: int, variant: str, rounds: list[dict[str, dict]], settings: Settings) -> dict[str, Any]:
    """One load and variant, of the runs of each round by variant, as sam.vllm.bench.engine.BenchEngine.run has them.

    Returns:
        Medians over the rounds of `seconds`, `tokens_per_s`, `step_ms` (milliseconds of a step) and `steps`;
        `by_round`: seconds of each; `acceptance_length`, `drafted` and `accepted` tokens of all rounds, None for stock;
        over the reference `compared`; `as_recorded`: responses equal to the recording's, None where no text is forced;
        `identical` of `responses` that equal those of `off`, None without it or without seeds; `tokens_ratio`: its
        tokens over the reference's; `draft_errors`; `asynchronous`: whether the engine schedules asynchronously.
    """
    runs, base = [one[variant] for one in rounds], [one[settings.reference] for one in rounds]

    def whole(name: str, of: list[dict] = runs) -> Any:
        values = [run[name] for run in of]
        return None if None in values else sum(values)

    verified, verify_steps, identical = whole("verified_tokens"), whole("verify_steps"), None
    if all("off" in one for one in rounds) and (settings.seeds or settings.temperature == 0):
        pairs = [zip(one[variant]["responses"], one["off"]["responses"], strict=True) for one in rounds]
        identical = sum(mine == theirs for pair in pairs for mine, theirs in pair)
    seconds = [run["seconds"] for run in runs]
    return {
        "requests": requests,
        "variant": variant,
        "rounds": len(rounds),
        "seconds": middle(seconds, 3),
        "by_round": seconds,
        "tokens_per_s": middle((run["tokens"] / run["seconds"] for run in runs), 1),
        "step_ms": middle((1e3 * run["seconds"] / run["steps"] for run in runs), 3),
        "steps": middle((run["steps"] for run in runs), 1),
        "acceptance_length": verify_steps and round(verified / verify_steps, 3) if verify_steps != 0 else 1.0,
        **{name: whole(name) for name in ("drafted", "accepted", "draft_errors", "as_recorded")},
        **compared(seconds, [run["seconds"] for run in base]),
        "identical": identical,
        "responses": sum(len(run["responses"]) for run in runs),
        "tokens_ratio": round(whole("tokens") / max(1, whole("tokens", base)), 3),
        "asynchronous": runs[-1]["asynchronous"],
    }


def verdict_line(row: dict[str, Any]) -> str:
    """The answer about a load in one line.

    Example:
        >>> verdict_line({"requests": 1, "rounds": 3} | compared([1.0, 1.0, 1.0], [0.9, 1.2, 1.1]))
        'too noisy to tell: 0.90x-1.20x at 1 request, 3 more rounds (--rounds 6 --resume)'
    """
    at = f"at {in_requests(row['requests'])}"
    if row["answer"] != NOISY:
        return f"{row['answer']}: {times(row)} {at}"
    more, interval = max(MORE_ROUNDS, FEWEST_ROUNDS - row["rounds"]), f"{row['low']:.2f}x-{row['high']:.2f}x"
    return f"{NOISY}: {interval} {at}, {more} more rounds (--rounds {row['rounds'] + more} --resume)"


def recommendation(answers: dict[int, str], draft_tokens: int) -> str:
    """Settings to paste behind a run script of the recipe, and why; by each load's answer."""
    if not answers:
        return ""
    if set(answers.values()) == {NO_GO}:
        return "speculation=off   # no load gains"
    if GO not in answers.values():
        return "no recommendation yet: no load is sure to gain"
    but = [str(requests) for requests, answer in answers.items() if answer != GO]
    keys = f"speculation.policy=goodput speculation.num_speculative_tokens={draft_tokens}"
    return f"speculation=sam {keys}" + (f"   # not sure to gain at {', '.join(but)}" if but else "")


def warnings_of(rows: list[dict[str, Any]], settings: Settings) -> list[str]:
    """What a reader must know before believing the rows."""
    found = []
    for row in rows:
        place = f"{row['variant']} at {in_requests(row['requests'])}"
        if row["draft_errors"]:
            found.append(f"{place}: drafting failed {row['draft_errors']} times: see {row['variant']}.log")
        if not is_stock(row["variant"]) and row["identical"] is not None and row["identical"] < row["responses"]:
            found.append(f"{place}: {row['responses'] - row['identical']} responses differ from those of off")
        if abs(row["tokens_ratio"] - 1) > SAME_WORK:
            found.append(
                f"{place}: {row['tokens_ratio']:.2f} times the tokens of {settings.reference}, so that seconds are not "
                "of the same work: use --ignore-eos or more rounds"
            )
    asynchronous = {row["variant"]: row["asynchronous"] for row in rows}
    synchronous = [variant for variant, its in asynchronous.items() if not its and not is_stock(variant)]
    behind = "schedules step by step, stock asynchronously: vLLM does not combine that with its drafter"
    return found + [f"{variant} {behind}" for variant in synchronous if asynchronous.get(STOCK)]


def what_was_measured(settings: Settings) -> list[str]:
    """Loads, sampling and reference, in words."""
    counts = [len(batches) for (round_, _), batches in planned(settings).items() if round_ == 1]
    loads = zip(counts, settings.requests, strict=True)
    batches = ", ".join(f"{count} of {in_requests(load)}" for count, load in loads)
    seeds = "all requests carry seeds" if settings.seeds else "no request carries a seed"
    lines = [f"batches of a round, one after another: {batches}; {settings.samples} requests of a prompt; {seeds}"]
    if settings.text:
        lines.append(f"all requests emit the responses of {settings.text.name}, whatever the logits say")
    elif STOCK in settings.variants and settings.seeds:
        lines.append(STOCK_SAMPLES)
    return lines if settings.reference == STOCK else [*lines, "compared with off, not with stock vLLM"]


def table_of(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the table, for the screen and for the report's page."""
    is_forced = result["settings"]["text"] is not None
    header = ["requests", "variant", "seconds", "tokens/s", "ms/step", "steps", "length", "drafted", "accepted"]
    header += [f"over {result['reference']}", "as recorded" if is_forced else "identical to off"]
    cells = []
    for row in result["rows"]:
        same = row["as_recorded"] if is_forced else row["identical"]
        cells.append([
            str(row["requests"]), row["variant"], f"{row['seconds']:.2f}", f"{row['tokens_per_s']:.1f}",
            f"{row['step_ms']:.2f}", f"{row['steps']:.0f}",
            "-" if (length := row["acceptance_length"]) is None else f"{length:.2f}",
            *("-" if (count := row[name]) is None else str(count) for name in ("drafted", "accepted")),
            times(row), "-" if same is None else f"{same} of {row['responses']}",
        ])  # fmt: skip
    return header, cells


def as_text(result: dict[str, Any]) -> str:
    """The result for a screen: rows, what to know of them, the verdicts, and settings to paste."""
    lines = laid_out(*table_of(result)) + result["measured"] if result["rows"] else ["nothing is measured yet"]
    lines += [f"warning: {warning}" for warning in result["warnings"]]
    return "\n".join([*lines, *result["lines"], result["recommended"]]).rstrip()
