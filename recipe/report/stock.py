"""Engines in turns on a run's recorded text, stock vLLM among them: what recipe.against_stock leaves in stock.json."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from recipe.report.runs import Run
from sam.bench.settings import STOCK
from sam.bench.verdict import decide, median_interval
from sam.config import WITH_DRAFT_MODEL
from sam.reading import ReadError, json_object, one_line
from sam.record.atomic import replacing
from sam.record.run_directory import responses_path

FILE = "stock.json"
POLICY = "goodput"  # of sam.bench's engines with sam or a trained drafter
MEASURE = "python -m recipe.against_stock"
HEADER = ("engine", "seconds a round, median", "times stock (range)", "tokens/s", "ms a step", "acceptance length")


@dataclass(frozen=True)
class AgainstStock:
    """Rounds in which engines take turns on the text of one run.

    Attributes:
        text: `text_of` the run and steps.
        steps: training steps whose text was emitted, in turn; the first one's to warm up.
        requests: requests of a round, which start together.
        seconds: engine (stock, off and the run's method) to the seconds of each round.
        rows: engine to medians over the rounds, as sam.bench's result has them.
        settings: of sam.bench.
        date: of the measurement.
    """

    text: str
    steps: list[int]
    requests: int
    seconds: dict[str, list[float]]
    rows: dict[str, dict]
    settings: dict
    date: str

    def save(self, directory: Path) -> None:
        """Write stock.json."""
        with replacing(directory / FILE) as partial:
            partial.write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, directory: Path, run: Run) -> tuple[Self | None, str]:
        """What stock.json says of the run, and what to know of that; None where there is none or of another text."""
        path = directory / FILE
        if not path.is_file():
            where = f"{run.source} --output {directory}" if run.directory else "RUN --output DIR"
            return None, f"Stock vLLM was not measured: {MEASURE} {where}, then this report again"
        try:
            with one_line(str(path), f"not what {MEASURE} writes"):
                found = cls(**json_object(path))
                found.table(), found.summary(), text_of(run, found.steps)
        except ReadError as error:
            return None, f"{error}: left out, measure again with {MEASURE}"
        if text_of(run, found.steps) != found.text:
            return None, f"{path} is of another run's text and left out: measure again with {MEASURE}"
        policy = (run.config.get("speculation") or {}).get("policy")
        if found.method in ("sam", *WITH_DRAFT_MODEL) and policy != POLICY:
            return found, f"engines alone drafted with policy={POLICY}, the run with policy={policy}"
        return found, ""

    @property
    def method(self) -> str:
        """The engine that drafts."""
        return next(engine for engine in self.seconds if engine not in (STOCK, "off"))

    def ratio(self, engine: str, reference: str = STOCK) -> tuple[float, float, float]:
        """Seconds of `reference` over those of `engine` in the same round: median, least, greatest."""
        return tuple(median_interval(self._ratios(engine, reference)))

    def _ratios(self, engine: str, reference: str) -> list[float]:
        pairs = zip(self.seconds[reference], self.seconds[engine], strict=True)
        return [theirs / its for theirs, its in pairs]

    def table(self) -> list[tuple]:
        """One row for each engine, as HEADER."""
        rows = []
        for engine, row in self.rows.items():
            length = "" if row["acceptance_length"] is None else f"{row['acceptance_length']:.2f}"
            figures = f"{row['tokens_per_s']:.0f}", f"{row['step_ms']:.1f}", length
            rows.append((engine, f"{row['seconds']:.2f}", times(self.ratio(engine)), *figures))
        return rows

    def summary(self) -> dict:
        """For summary.json."""
        return {
            "rounds": len(self.seconds[STOCK]),
            "requests": self.requests,
            "seconds": {engine: row["seconds"] for engine, row in self.rows.items()},
            "over_stock": {engine: list(self.ratio(engine)) for engine in self.seconds if engine != STOCK},
            f"{self.method}_over_off": list(self.ratio(self.method, "off")),
            "verdict": decide(self._ratios(self.method, STOCK)).answer,
            "date": self.date,
        }


def times(ratio: tuple[float, float, float]) -> str:
    """A ratio and its range, for a reader."""
    return "{:.2f}x ({:.2f}-{:.2f})".format(*ratio)


def text_of(run: Run, steps: list[int]) -> str:
    """A name of the responses that a run recorded in these steps; empty where it has not."""
    paths = [responses_path(run.directory, step) for step in steps] if run.directory else []
    if not paths or not all(path.is_file() for path in paths):
        return ""
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()[:16]
