"""Engines in turns on a run's recorded text, stock vLLM among them: what recipe.against_stock leaves in stock.json.

It is the result of sam.bench and, of the run, `steps`: whose text was emitted, in turn, the first one's to warm up; and
`text`: `text_of` these.
"""

import hashlib
from pathlib import Path
from typing import Any

from recipe.report.runs import Run
from sam.bench.result import compared, table_of
from sam.bench.settings import STOCK
from sam.config import WITH_DRAFT_MODEL
from sam.reading import ReadError, json_object, one_line
from sam.record.run_directory import responses_path

FILE = "stock.json"
POLICY = "goodput"  # of sam.bench's engines with sam or a trained drafter
MEASURE = "python -m recipe.against_stock"


def load(directory: Path, run: Run) -> tuple[dict[str, Any] | None, str]:
    """What stock.json says of the run, and what to know of that; None where there is none or of another text."""
    path = directory / FILE
    if not path.is_file():
        where = f"{run.source} --output {directory}" if run.directory else "RUN --output DIR"
        return None, f"Stock vLLM was not measured: {MEASURE} {where}, then this report again"
    try:
        with one_line(str(path), f"not what {MEASURE} writes"):
            found = json_object(path)
            table_of(found), summary(found)
            is_its_text = text_of(run, found["steps"]) == found["text"]
    except ReadError as error:
        return None, f"{error}: left out, measure again with {MEASURE}"
    if not is_its_text:
        return None, f"{path} is of another run's text and left out: measure again with {MEASURE}"
    policy = (run.config.get("speculation") or {}).get("policy")
    if method_of(found) in ("sam", *WITH_DRAFT_MODEL) and policy != POLICY:
        return found, f"engines alone drafted with policy={POLICY}, the run with policy={policy}"
    return found, ""


def rows_of(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of the table by engine: stock, off and the run's method."""
    return {row["variant"]: row for row in found["rows"]}


def method_of(found: dict[str, Any]) -> str:
    """The engine that drafts."""
    return next(engine for engine in rows_of(found) if engine not in (STOCK, "off"))


def summary(found: dict[str, Any]) -> dict[str, Any]:
    """For summary.json; ratios are median, least and greatest."""
    rows, method = rows_of(found), method_of(found)
    over_off = compared(rows[method]["by_round"], rows["off"]["by_round"])
    return {
        "rounds": rows[STOCK]["rounds"],
        "requests": rows[STOCK]["requests"],
        "seconds": {engine: row["seconds"] for engine, row in rows.items()},
        "over_stock": {engine: _ratio(row) for engine, row in rows.items() if engine != STOCK},
        f"{method}_over_off": _ratio(over_off),
        "verdict": rows[method]["answer"],
        "date": found["date"],
    }


def _ratio(row: dict[str, Any]) -> list[float]:
    return [row[name] for name in ("ratio", "low", "high")]


def text_of(run: Run, steps: list[int]) -> str:
    """A name of the responses that a run recorded in these steps; empty where it has not."""
    paths = [responses_path(run.directory, step) for step in steps] if run.directory else []
    if not paths or not all(path.is_file() for path in paths):
        return ""
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()[:16]
