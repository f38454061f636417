"""Reads what is compared: run directories of recipe.main_dapo, runs on a wandb server, and stock.json.

A run of a server has neither engine steps nor responses; figures that need them are None then. wandb 0.31 has no public
reader of its own files: a run directory has the same figures in metrics.jsonl.

`sam bench --run` leaves stock.json: the result of engines that took turns on a run's recorded text, stock vLLM among
them, with the `steps` whose text they emitted, the first one's to warm up, and `text`: `text_of` these.
"""

import hashlib
import re
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import numpy as np

from recipe.launch.environment import has_wandb_key
from sam.bench.result import compared, table_of
from sam.bench.settings import STOCK
from sam.config import WITH_DRAFT_MODEL
from sam.reading import ReadError, expect, json_object, one_line
from sam.record.engine_steps import EngineSteps
from sam.record.responses import (
    METRICS_FILE,
    Response,
    finite,
    read_config,
    read_metrics,
    read_responses,
    responses_path,
)

# The server's own clock, and verl's, which waits in steps of two seconds but is in every run of verl's.
ROLLOUT_SECONDS = ("rollout/seconds", "timing_s/gen")
TAIL_SECONDS = "rollout/tail_seconds"
LEFT_OUT = ": left out"
EXPECTED = (
    "expected a run directory of recipe.main_dapo (its run_dir), or a run on a wandb server as entity/project/run_id "
    "or its address (an offline folder of wandb without its run directory: upload it with `wandb sync` first)"
)
# Entity, project, id; what follows in an address is a view of the run.
ADDRESSES = (
    re.compile(r"https?://.*?([\w.-]+)/([\w.-]+)/runs/([\w-]+)(?:[/?#].*)?"),
    re.compile(r"([\w.-]+)/([\w.-]+)/(?:runs/)?([\w-]+)"),
)
HOSTED = ("wandb.ai", "coreweave.com")  # where wandb's own client goes without being told
NOT_JSON = ("NaN", "Infinity", "-Infinity")
STOCK_FILE = "stock.json"
POLICY = "goodput"  # of sam.bench's engines with sam or a trained drafter
MEASURE = "sam bench --run"


class ReportError(ReadError):
    """A run cannot be reported; one line says why."""


@contextmanager
def left_out(remarks: list[str]):
    """Report without what cannot be read, whose line becomes a remark."""
    try:
        yield
    except ReadError as error:
        if (line := f"{error}{LEFT_OUT}") not in remarks:
            remarks.append(line)


@dataclass
class Run:
    """One run's records.

    Attributes:
        name: its speculation's method, as far as the config says it.
        source: what the user named it by: a directory, or entity/project/run_id.
        metrics: training step -> what went to wandb; step 0 is the first validation.
        directory: has engine steps and responses; None for a run of wandb, which has neither.
        rollout_key: the metric that `seconds` adds up, one of ROLLOUT_SECONDS.
        remarks: what a reader of its figures should know.

    Raises:
        ReportError: no training step has finished.
    """

    name: str
    source: str
    config: dict
    versions: dict
    metrics: dict[int, dict[str, float]]
    directory: Path | None = None
    rollout_key: str = ROLLOUT_SECONDS[0]
    remarks: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.metrics = {step: finite(row) for step, row in self.metrics.items()}
        if not any(key in row for row in self.metrics.values() for key in ROLLOUT_SECONDS):
            raise ReportError(
                f"{self.source}: no training step has finished there (no step has {' or '.join(ROLLOUT_SECONDS)}): "
                "name a run that has trained"
            )

    @classmethod
    def load(cls, directory: Path, is_whole: bool = True) -> Self:
        """Read a run directory of recipe.main_dapo.

        Raises:
            ReportError: no step has finished there; or something cannot be read, which without `is_whole` becomes a
                remark.
        """
        if not (directory / METRICS_FILE).is_file():
            raise ReportError(f"{directory}: no {METRICS_FILE} there; expected a run directory of recipe.main_dapo")
        config, versions, rows, remarks = {}, {}, [], []
        with left_out(remarks):
            metrics = read_metrics(directory, rows)
        with left_out(remarks):
            config = read_config(directory)
        with left_out(remarks):
            versions = json_object(directory / "versions.json")
        remarks += [line + LEFT_OUT for line in rows]
        if is_whole and remarks:
            raise ReportError(remarks[0].removesuffix(LEFT_OUT))
        name = config["speculation"]["method"] if config else directory.name
        return cls(name, str(directory), config, versions, metrics, directory, remarks=remarks)

    @property
    def steps(self) -> list[int]:
        """Training steps whose rollout was timed."""
        return sorted(step for step, row in self.metrics.items() if self.rollout_key in row)

    @cached_property
    def recorded(self) -> dict[int, EngineSteps]:
        """The first replica's engine steps by training step; none, and a remark, where one cannot be read."""
        found: dict[int, EngineSteps] = {}
        with left_out(self.remarks):
            for step in self.steps if self._has_files(EngineSteps.path) else ():
                one, place = EngineSteps.load(self.directory, step), str(EngineSteps.path(self.directory, step))
                expect(len(one) > 0, place, "engine steps", "none")
                found[step] = one
            return found
        return {}

    @property
    def has_responses(self) -> bool:
        """Whether those of all training steps are there."""
        return self._has_files(responses_path)

    def _has_files(self, path: Callable[[Path, int], Path]) -> bool:
        return self.directory is not None and all(path(self.directory, step).is_file() for step in self.steps)

    def responses(self, step: int) -> list[Response]:
        """Those of a step; none, and a remark, where they cannot be read."""
        with left_out(self.remarks):
            return read_responses(self.directory, step)
        return []

    def threshold(self) -> int | None:
        """Running requests at or below which a rollout is in its tail; None where the run's config has none."""
        value = (self.config.get("speculation") or {}).get(name := "batch_size_threshold")
        expect(value is None or type(value) is int, f"{self.source}, speculation.{name}", "a whole number", value)
        return value

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Training steps that have a figure, and its values."""
        points = {step: row[key] for step, row in sorted(self.metrics.items()) if key in row}
        return list(points), list(points.values())

    def column(self, key: str, steps: list[int]) -> np.ndarray | None:
        """float [steps] of a figure; None where a step has none."""
        values = [self.metrics[step].get(key) for step in steps]
        return None if None in values else np.array(values)

    def seconds(self, steps: list[int], key: str | None = None) -> float | None:
        """Sum over these steps of the rollout's seconds, or of another figure; None where a step has none."""
        column = self.column(key or self.rollout_key, steps)
        return None if column is None else float(column.sum())

    def acceptance(self) -> tuple[float | None, float | None]:
        """Mean acceptance length (accepted plus bonus, per verify step of a request) and acceptance rate."""
        names = ("accept_length", "verify_steps", "accepted_tokens", "drafted_tokens")
        length, *columns = (self.column(f"rollout/spec_{name}", self.steps) for name in names)
        if any(column is None for column in (length, *columns)):
            return None, None
        verified, accepted, drafted = (float(column.sum()) for column in columns)
        emitted = float((length * columns[0]).sum())
        return (emitted / verified if verified else 1.0), (accepted / drafted if drafted else 0.0)


def load_run(source: str) -> Run:
    """Read a run, whatever `source` names it by.

    Raises:
        ReportError: `source` is none of what EXPECTED says, cannot be read, or has not trained.
    """
    path = Path(source)
    # The run directory, or a folder of wandb in it: wandb writes wandb/offline-run-* there.
    for folder in (path, *path.absolute().parents[:3]) if path.exists() else ():
        if (folder / METRICS_FILE).is_file():
            return Run.load(folder, is_whole=False)
    matches = [match for address in ADDRESSES if (match := address.fullmatch(source))]
    if path.exists() or not matches or source.startswith((".", "/")):
        raise ReportError(f"{source}: no {METRICS_FILE} there; {EXPECTED}: check the path")
    if not has_wandb_key():
        raise ReportError(
            f"{source}: no such folder, and no key to look for a run of that name on a wandb server; {EXPECTED}: check "
            "the path, or set WANDB_API_KEY or run `wandb login`"
        )
    return _load_online(source, "/".join(matches[0].groups()))


def _load_online(source: str, address: str) -> Run:
    """A run on a wandb server, through wandb's public API; `address` is entity/project/run_id."""
    import wandb

    url = urlsplit(source)
    own_server = url.netloc and not url.netloc.endswith(HOSTED)
    overrides = {"base_url": f"{url.scheme}://{url.netloc}"} if own_server else None
    try:
        found = wandb.Api(overrides=overrides, timeout=60).run(address)
        rows, config, name, date = list(found.scan_history()), dict(found.config), found.name, found.created_at
    except Exception as error:  # wandb's own, its service's, its HTTP library's: nothing that they share
        raise ReportError(
            f"{source}: no such folder, and wandb says: {' '.join(str(error).split()) or type(error).__name__}; "
            f"{EXPECTED}: check the spelling, and that the key may read the project"
        ) from error
    metrics: dict[int, dict[str, float]] = {}
    for row in rows:
        numbers = {key: value for key, value in row.items() if type(value) in (int, float) or value in NOT_JSON}
        own = {key: float(value) for key, value in numbers.items() if not key.startswith("_")}  # others are wandb's
        metrics.setdefault(int(row["_step"]), {}).update(own)
    method = (config.get("speculation") or {}).get("method")
    return Run(method or name, source, config, {"date": date}, metrics)


def make_comparable(runs: list[Run]) -> None:
    """Give the runs different names, and one measure of rollout time, which all of them have."""
    names: list[str] = []
    for run in runs:
        names.append(run.name)
        if (count := names.count(run.name)) > 1:
            run.name = f"{run.name} {count}"
    key = next((key for key in ROLLOUT_SECONDS if all(run.series(key)[0] for run in runs)), None)
    if key is None:
        raise ReportError(
            f"{' and '.join(run.source for run in runs)}: no measure of rollout time in common; expected "
            f"{' or '.join(ROLLOUT_SECONDS)} in all of them: compare runs of verl's V1 trainer"
        )
    for run in runs:
        run.rollout_key = key


def common_steps(first: Run, second: Run) -> list[int]:
    """Training steps that both have.

    Raises:
        ReportError: there are none.
    """
    steps = sorted(set(first.steps) & set(second.steps))
    if not steps:
        raise ReportError(
            f"{first.source} and {second.source} have no training step in common (they have {first.steps[0]} to "
            f"{first.steps[-1]} and {second.steps[0]} to {second.steps[-1]}): name runs that began alike"
        )
    return steps


def compare_responses(one: Run, other: Run) -> dict[int, tuple[int, int]]:
    """step -> (identical responses, responses that both runs have); empty where a run has not recorded them."""
    result = {}
    if not (one.has_responses and other.has_responses):
        return result
    for step in sorted(set(one.steps) & set(other.steps)):
        mine, theirs = (
            {(row.prompt, row.sample): row.response_tokens for row in run.responses(step)} for run in (one, other)
        )
        if mine and theirs:
            common = mine.keys() & theirs.keys()
            result[step] = (sum(np.array_equal(mine[key], theirs[key]) for key in common), len(common))
    return result


def load_stock(directory: Path, run: Run) -> tuple[dict[str, Any] | None, str]:
    """What stock.json says of the run, and what to know of that; None where there is none or of another text."""
    path = directory / STOCK_FILE
    if not path.is_file():
        where = f"{run.source} --output {directory}" if run.directory else "RUN --output DIR"
        return None, f"Stock vLLM was not measured: {MEASURE} {where}, then this report again"
    try:
        with one_line(str(path), f"not what {MEASURE} writes"):
            found = json_object(path)
            table_of(found), stock_summary(found)
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


def stock_summary(found: dict[str, Any]) -> dict[str, Any]:
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
