"""Engines in turns on a run's recorded text, stock vLLM among them: what recipe.against_stock leaves in stock.json."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import numpy as np

from recipe.report.runs import Run
from recipe.report.timeline import label
from sam.bench.charts import COLORS
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
        rows: engine to medians over the rounds, as sam.bench.table.rows_of.
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
            length = row["acceptance_length"]
            figures = (row["seconds"], row["tokens_per_s"], row["step_ms"])
            seconds, speed, step = (f"{figure:.{digits}f}" for figure, digits in zip(figures, (2, 0, 1), strict=True))
            shown = "" if length is None else f"{length:.2f}"
            rows.append((engine, seconds, times(self.ratio(engine)), speed, step, shown))
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


def draw_stock(axes, stock: AgainstStock) -> None:
    """Median seconds of a round of each engine, with their range."""
    engines = list(stock.rows)
    medians = [stock.rows[engine]["seconds"] for engine in engines]
    ends = zip(medians, map(stock.seconds.get, engines), strict=True)
    around = [(median - min(its), max(its) - median) for median, its in ends]
    axes.bar(
        engines, medians, 0.62, yerr=np.array(around).T, capsize=4, color=[COLORS[e] for e in engines],
        error_kw={"elinewidth": 1, "ecolor": "#555555"},
    )  # fmt: skip
    names = ["stock vLLM" if e == STOCK else f"{e}\n{times(stock.ratio(e))}" for e in engines]
    axes.set_xticks(range(len(engines)), names)
    for place, median in enumerate(medians):
        axes.text(place, 0.04 * max(medians), f"{median:.2f} s", ha="center", color="white", fontsize=9)
    label(axes, "", "seconds a round", legend=False)
