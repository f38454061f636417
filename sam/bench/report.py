"""The measured rounds as a result: rows, verdicts, warnings and settings to paste, as text and as a page."""

import importlib.util
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from sam.bench.charts import ratios
from sam.bench.loads import batch_count
from sam.bench.settings import STOCK, Settings, is_stock
from sam.bench.verdict import GO, NO_GO, NOISY, Verdict, decide, in_requests, median_interval
from sam.page import chart, page, paragraph, table, verbatim

SAME_WORK = 0.05  # share by which the tokens of two variants may differ before a reader is warned
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
STOCK_SAMPLES = (
    "stock samples with vLLM's own generators: other tokens of the same distribution, unless T is 0; on a CPU seeds "
    "slow it down: compare with --no-seeds too"
)


def result_of(lines: Iterable[dict[str, Any]], settings: Settings, notes: list[str], vllm: str) -> dict[str, Any]:
    """What is measured so far, as result.json has it.

    Args:
        lines: of sam.bench.rounds.RoundsFile.
        notes: what to know of the input.
        vllm: its version.

    Returns:
        `date`, `vllm`, `settings`, `rows` (see `row_of`), `verdicts` by load, their `lines` in words, `recommended`
        settings to paste, and `warnings`.
    """
    rows, verdicts = [], {}
    for load, requests in enumerate(settings.requests):
        rounds = [line["runs"] for line in lines if line["load"] == load]
        for variant in settings.variants:
            if its_rounds := [runs for runs in rounds if variant in runs]:
                rows.append(row_of(requests, variant, its_rounds, settings))
                if variant == "sam":
                    verdicts[requests] = decide(_ratios(its_rounds, settings.reference, variant))
    return {
        "date": str(date.today()),
        "vllm": vllm,
        "settings": vars(settings),
        "rows": rows,
        "verdicts": {str(requests): vars(verdict) for requests, verdict in verdicts.items()},
        "lines": [verdict.line(requests) for requests, verdict in verdicts.items()],
        "recommended": recommendation(verdicts, settings),
        "warnings": [*notes, *warnings_of(rows, settings)],
    }


def row_of(requests: int, variant: str, rounds: list[dict[str, dict]], settings: Settings) -> dict[str, Any]:
    """One load and variant.

    Args:
        rounds: of each round the runs by variant, as sam.vllm.bench.engine.BenchEngine.run returns them.

    Returns:
        Medians over the rounds of `seconds`, `tokens_per_s`, `step_ms` (milliseconds of a step) and `steps`;
        `by_round`: seconds of each; `acceptance_length` over all rounds, `drafted` and `accepted` tokens of all rounds,
        None for stock; `ratio`, `low`, `high`: seconds of the reference in the same round over the variant's, as
        sam.bench.verdict.median_interval; `all_rounds`: the same of all rounds' seconds; `as_recorded`: responses equal
        to the recording's, None where no text is forced; `identical` of `responses` that equal those of `off`, None
        without it or without seeds; `tokens_ratio`: its tokens over the reference's; `draft_errors`; `asynchronous`:
        whether the engine schedules asynchronously.
    """
    runs, base = [one[variant] for one in rounds], [one[settings.reference] for one in rounds]
    ratio, low, high = median_interval(_ratios(rounds, settings.reference, variant))

    def middle(values: Iterable[float], digits: int) -> float:
        return round(float(np.median(list(values))), digits)

    def whole(name: str, of: list[dict] = runs) -> Any:
        values = [run[name] for run in of]
        return None if None in values else sum(values)

    verified, verify_steps = whole("verified_tokens"), whole("verify_steps")
    return {
        "requests": requests,
        "variant": variant,
        "rounds": len(rounds),
        "seconds": middle((run["seconds"] for run in runs), 3),
        "by_round": [run["seconds"] for run in runs],
        "tokens_per_s": middle((run["tokens"] / run["seconds"] for run in runs), 1),
        "step_ms": middle((1e3 * run["seconds"] / run["steps"] for run in runs), 3),
        "steps": middle((run["steps"] for run in runs), 1),
        "acceptance_length": verify_steps and round(verified / verify_steps, 3) if verify_steps != 0 else 1.0,
        **{name: whole(name) for name in ("drafted", "accepted", "draft_errors")},
        "ratio": ratio, "low": low, "high": high,
        "all_rounds": round(whole("seconds", base) / whole("seconds"), 3),
        "identical": _identical(rounds, variant, settings),
        "as_recorded": whole("as_recorded"),
        "responses": sum(len(run["responses"]) for run in runs),
        "tokens_ratio": round(whole("tokens") / max(1, whole("tokens", base)), 3),
        "asynchronous": runs[-1]["asynchronous"],
    }  # fmt: skip


def _ratios(rounds: list[dict[str, dict]], reference: str, variant: str) -> list[float]:
    """Seconds of the reference over the variant's, round by round."""
    return [one[reference]["seconds"] / one[variant]["seconds"] for one in rounds]


def _identical(rounds: list[dict[str, dict]], variant: str, settings: Settings) -> int | None:
    if not all("off" in one for one in rounds) or not (settings.seeds or settings.temperature == 0):
        return None
    pairs = [(one[variant]["responses"], one["off"]["responses"]) for one in rounds]
    return sum(a == b for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))


def recommendation(verdicts: dict[int, Verdict], settings: Settings) -> str:
    """Settings to paste behind a run script of the recipe, and why."""
    answers = {requests: verdict.answer for requests, verdict in verdicts.items()}
    if not answers:
        return ""
    if all(answer == NO_GO for answer in answers.values()):
        return "speculation=off   # no load gains"
    if GO not in answers.values():
        return "no recommendation yet: no load is sure to gain"
    but = []
    for answer, words in ((NO_GO, "loses"), (NOISY, "is not known")):
        if loads := [str(requests) for requests, its in answers.items() if its == answer]:
            but.append(f"{words} at {', '.join(loads)}")
    keys = f"speculation.policy=goodput speculation.num_speculative_tokens={settings.draft_tokens}"
    return f"speculation=sam {keys}" + (f"   # {' and '.join(but)}" if but else "")


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
    if asynchronous.get(STOCK):
        found += [
            f"{variant} schedules step by step, stock asynchronously: vLLM does not combine that with its drafter"
            for variant, its in asynchronous.items()
            if not its and not is_stock(variant)
        ]
    return found


def cells_of(rows: list[dict[str, Any]], settings: Settings) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the table, for the screen and the page."""
    header = ["requests", "variant", "seconds", "tokens/s", "ms/step", "steps", "length", "drafted", "accepted"]
    header += [f"over {settings.reference}", "all", "as recorded" if settings.text else "identical to off"]
    cells = []
    for row in rows:
        same = row["as_recorded"] if settings.text else row["identical"]
        cells.append([
            str(row["requests"]), row["variant"], f"{row['seconds']:.2f}", f"{row['tokens_per_s']:.1f}",
            f"{row['step_ms']:.2f}", f"{row['steps']:.0f}",
            "-" if (length := row["acceptance_length"]) is None else f"{length:.2f}",
            *("-" if (count := row[name]) is None else str(count) for name in ("drafted", "accepted")),
            f"{row['ratio']:.2f}x ({row['low']:.2f}-{row['high']:.2f})", f"{row['all_rounds']:.2f}x",
            "-" if same is None else f"{same} of {row['responses']}",
        ])  # fmt: skip
    return header, cells


def as_text(result: dict[str, Any], settings: Settings) -> str:
    """The result for a screen: rows, what to know of them, the verdicts, and settings to paste."""
    if not result["rows"]:
        return "\n".join(["nothing is measured yet", *(f"warning: {warning}" for warning in result["warnings"])])
    header, cells = cells_of(result["rows"], settings)
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in (header, *cells)]
    lines += what_was_measured(settings)
    lines += [f"warning: {warning}" for warning in result["warnings"]]
    return "\n".join([*lines, *result["lines"], result["recommended"]]).rstrip()


def what_was_measured(settings: Settings) -> list[str]:
    """Loads, sampling and reference, in words."""
    counts = ((batch_count(load, settings.responses), load) for load in settings.requests)
    batches = ", ".join(f"{count} of {in_requests(load)}" for count, load in counts)
    seeds = "all requests carry seeds" if settings.seeds else "no request carries a seed"
    lines = [f"batches of a round, one after another: {batches}; {settings.samples} requests of a prompt; {seeds}"]
    if settings.text:
        lines.append(f"all requests emit the responses of {settings.text}, whatever the logits say")
    elif STOCK in settings.variants and settings.seeds:
        lines.append(STOCK_SAMPLES)
    if settings.reference != STOCK:
        lines.append("compared with off, not with stock vLLM")
    return lines


def as_page(result: dict[str, Any], settings: Settings) -> str:
    """bench.html: the answer first, then a picture, where there is matplotlib to draw it, and the table."""
    rows, figure = result["rows"], ""
    if HAS_MATPLOTLIB and len(settings.variants) > 1:
        caption = f"Median and range over the rounds; {settings.reference} is the line at 1."
        figure = chart(ratios(rows, settings), "speed by load", caption)
    measured = [
        f"model {settings.model}",
        f"vLLM {result['vllm']}, {' '.join(settings.engine) or 'no further arguments'}",
        f"temperature {settings.temperature}, responses of at most {settings.max_tokens} tokens, drafts of at most "
        f"{settings.draft_tokens}",
        *what_was_measured(settings),
    ]
    sections = [
        ("", verbatim(result["recommended"]) if result["recommended"] else ""),
        ("", "".join(paragraph(f"Note: {warning}.") for warning in result["warnings"])),
        ("Speed", figure),
        ("Table", table(*cells_of(rows, settings))),
        ("What was measured", verbatim("\n".join(measured))),
    ]
    title = f"Does speculation pay? {Path(settings.model).name}, {result['date']}"
    return page(title, [one for one in sections if one[1]], result["lines"] or ["No verdict: sam takes no part."])
