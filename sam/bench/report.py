"""bench.html: the answer first, then pictures, tables, and one response with its drafts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sam.bench import charts, followed
from sam.bench.charts import Recorded
from sam.bench.settings import STOCK, Settings
from sam.bench.table import batches_in_words, engines_of, split_of_step
from sam.bench.verdict import in_requests
from sam.page import chart, page, paragraph, side_by_side, table, verbatim

HEADER = (
    "requests", "variant", "speed over {}", "range", "seconds", "tokens/s", "ms a step", "steps", "acceptance length",
    "drafted", "accepted", "{}",
)  # fmt: skip
ENGINES = ("variant", "start-up s", "memory MiB", "schedules", "replayed a graph")


def bench_page(result: dict[str, Any], settings: Settings, recorded: Recorded, tokenizer: Path | None) -> str:
    """The page of a result.

    Args:
        result: as result.json has it.
        recorded: what happened step by step in each batch of the first round, by load and variant.
        tokenizer: folder, for the response as text.
    """
    model = Path(settings.model).name
    answer = result["lines"] or ["No verdict: sam takes no part."]
    sections = [
        ("", verbatim(result["recommended"]) if result["recommended"] else ""),
        ("", "".join(paragraph(f"Note: {warning}.") for warning in result["warnings"])),
        ("Speed", side_by_side(_charts(result["rows"], settings, recorded))),
        ("Table", table(*_rows(result["rows"], settings))),
        *_response(settings, recorded, followed.decoder(tokenizer)),
        ("Where a step's time goes", _split(result["rows"])),
        ("Engines", table(ENGINES, engines_of(result["rows"]))),
        ("What was measured", verbatim(_what(result, settings))),
    ]
    kept = [section for section in sections if section[1]]
    return page(f"Does speculation pay? {model}, {result['date']}", kept, answer, followed.STYLE)


def _charts(rows: list[dict], settings: Settings, recorded: Recorded) -> list[str]:
    others = [variant for variant in settings.variants if variant != settings.reference]
    found = []
    if others:
        caption = f"Median and range over the rounds; {settings.reference} is the line at 1."
        found.append(chart(charts.ratios(rows, settings), "speed by load", caption))
    if recorded and (figure := charts.step_costs(recorded)) is not None:
        caption = "The first round. A draft pays where the line is flat: more tokens in a step, hardly more time."
        found.append(chart(figure, "milliseconds of a step by its tokens", caption))
    loads = sorted({load for load, _ in recorded})
    for load in [load for load in loads if load > 1] or loads:
        caption = "The first round, batch after batch: who ends earlier is faster."
        found.append(chart(charts.running(recorded, load), f"requests over time at {in_requests(load)}", caption))
    for load in loads:
        if (one := recorded.get((load, "sam"))) and (figure := charts.drafts(one, load, "sam")) is not None:
            caption = "The first round: draft tokens that goodput chose to verify, and those that were right."
            found.append(chart(figure, f"draft tokens over time at {in_requests(load)}", caption))
    return found


def _rows(rows: list[dict], settings: Settings) -> tuple[list[str], list[tuple]]:
    equal = "as_recorded" if settings.text else "identical"
    titles = iter((settings.reference, "as recorded" if settings.text else "identical to off"))
    header = [title.format(next(titles)) if "{}" in title else title for title in HEADER]
    lines = [
        (
            row["requests"], row["variant"], f"{row['ratio']:.2f}x", f"{row['low']:.2f} to {row['high']:.2f}",
            f"{row['seconds']:.2f}", f"{row['tokens_per_s']:.1f}", f"{row['step_ms']:.2f}", f"{row['steps']:.0f}",
            *(_known(row[name]) for name in ("acceptance_length", "drafted", "accepted")),
            "-" if row[equal] is None else f"{row[equal]} of {row['responses']}",
        )
        for row in rows
    ]  # fmt: skip
    return header, lines


def _known(value: float | None) -> str:
    return "-" if value is None else str(value)


def _split(rows: list[dict]) -> str:
    parts = [(row["requests"], row["variant"], *split) for row in rows if (split := split_of_step(row)) is not None]
    if not parts:
        return ""
    header = ("requests", "variant", "forward pass", "sampling and verification", "drafting", "all else", "ms a step")
    text = (
        "Mean milliseconds on the host. On an accelerator the forward pass is only launched there, and sampling waits "
        "for it. Stock vLLM does not tell."
    )
    return table(header, parts) + paragraph(text)


def _response(
    settings: Settings, recorded: Recorded, decode: Callable[[list[int]], list[str]]
) -> list[tuple[str, str]]:
    """The first request of a batch, of the largest load in which sam drafted for it."""
    places = [(load, batch) for load in settings.requests for batch in recorded.get((load, "sam"), [])]
    for load, batch in sorted(places, key=lambda place: -place[0]):
        steps = batch.get("followed") or []
        if any(draft for draft, _ in steps):
            tokens = followed.tokens_of(steps, settings.max_tokens)
            text = paragraph(followed.summary(tokens)) + followed.as_html(tokens, decode)
            return [(f"What speculation does: a response at {in_requests(load)}", text)]
    return []


def _what(result: dict[str, Any], settings: Settings) -> str:
    source = f"responses of {settings.text}, forced" if settings.text else f"at most {settings.max_tokens} tokens"
    lines = [
        f"model        {settings.model}",
        f"vLLM         {result['vllm']}, {' '.join(settings.engine) or 'no further arguments'}",
        f"loads        {' '.join(map(str, settings.requests))} requests, {settings.samples} of a prompt, {source}",
        f"batches      {batches_in_words(settings)}, one after another in a round",
        f"sampling     temperature {settings.temperature}, {'seeds' if settings.seeds else 'no seeds'}",
        f"variants     {' '.join(settings.variants)}, drafts of at most {settings.draft_tokens} tokens",
    ]
    if STOCK in settings.variants:
        lines.append("stock        vLLM as shipped, in a process of its own, without this project's plugin")
    return "\n".join(lines)
