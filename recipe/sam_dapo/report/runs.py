"""Reads what is compared: run directories of `sam run`, and stock.json.

`sam bench --run` leaves stock.json: the result of engines that took turns on a run's recorded text, stock vLLM among
them, with the `steps` whose text they emitted, the first one's to warm up, and `text`: `text_of` these.
"""

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np

from sam.config import WITH_DRAFT_MODEL
from sam.reading import ReadError, expect, json_object, json_rows, one_line
from sam.record.engine_steps import EngineSteps
from sam.record.responses import (
    CONFIG_FILE,
    METRICS_FILE,
    read_config,
    read_metrics,
    read_responses,
    responses_path,
)
from sam.record.tokenizer import Tokenizer
from sam.tools.bench.result import table_of
from sam.tools.bench.settings import STOCK

ROLLOUT_SECONDS = "rollout/seconds"
TAIL_SECONDS = "rollout/tail_seconds"
STOCK_FILE = "stock.json"
POLICY = "goodput"  # of sam.tools.bench's engines with sam or a trained drafter
MEASURE = "sam bench --run"
TEXTS = 3  # responses that the page shows
SHOWN = 400  # tokens of each


@dataclass
class Run:
    """One run's records.

    Attributes:
        name: its speculation's method.
        metrics: training step -> what went to wandb; step 0 is the first validation.
        remarks: what a reader of its figures should know.

    Raises:
        ReadError: no training step has finished.
    """

    name: str
    directory: Path
    config: dict
    versions: dict
    metrics: dict[int, dict[str, float]]
    remarks: list[str] = field(default_factory=list)

    def __post_init__(self):
        if not self.steps:
            raise ReadError(f"{self.directory}: no training step has finished there: name a run that has trained")

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read a run directory of `sam run`; ReadError: no step has finished there, or a file is damaged."""
        if not (directory / METRICS_FILE).is_file():
            raise ReadError(f"{directory}: no {METRICS_FILE} there; expected a run directory of sam run")
        config = read_config(directory)
        versions = json_object(directory / "versions.json")
        return cls(config["speculation"]["method"], directory, config, versions, read_metrics(directory))

    @property
    def steps(self) -> list[int]:
        """Training steps whose rollout was timed."""
        return sorted(step for step, row in self.metrics.items() if ROLLOUT_SECONDS in row)

    @cached_property
    def recorded(self) -> dict[int, EngineSteps]:
        """The first replica's engine steps by training step; none where a step has no file."""
        steps = self.steps if self._has_files(EngineSteps.path) else ()
        return {step: EngineSteps.load(self.directory, step) for step in steps}

    @property
    def has_responses(self) -> bool:
        """Whether those of all training steps are there."""
        return self._has_files(responses_path)

    def _has_files(self, path: Callable[[Path, int], Path]) -> bool:
        return all(path(self.directory, step).is_file() for step in self.steps)

    def median_step(self) -> int:
        """The training step whose rollout took as long as most."""
        ordered = sorted(self.steps, key=lambda step: self.metrics[step][ROLLOUT_SECONDS])
        return ordered[len(ordered) // 2]

    def spans(self, step: int) -> dict[tuple[int, int], tuple[float, float]]:
        """(prompt, sample) -> when a step's response was asked for and when it was there, Unix seconds; of those that
        say so, which older versions' do not."""
        path = responses_path(self.directory, step)
        if not path.is_file():
            return {}
        spans = {}
        for key, span in json_rows(path, _span_of):
            if span is not None:
                spans[key] = span
        return spans

    def threshold(self) -> int | None:
        """Running requests at or below which a rollout is in its tail; None where the run's config has none."""
        value = (self.config.get("speculation") or {}).get("batch_size_threshold")
        place = f"{self.directory}, speculation.batch_size_threshold"
        expect(value is None or type(value) is int, place, "a whole number", value)
        return value

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Training steps that have a figure, and its values."""
        points = {step: row[key] for step, row in sorted(self.metrics.items()) if key in row}
        return list(points), list(points.values())

    def seconds(self, steps: list[int], key: str = ROLLOUT_SECONDS) -> float | None:
        """Sum over these steps of the rollout's seconds, or of another figure; None where a step has none."""
        values = [self.metrics[step].get(key) for step in steps]
        return None if None in values else float(sum(values))

    def acceptance(self) -> tuple[float | None, float | None]:
        """Mean acceptance length (accepted plus bonus, per verify step of a request) and acceptance rate."""
        names = ("verify_steps", "accepted_tokens", "drafted_tokens")
        sums = [self.seconds(self.steps, f"rollout/spec_{name}") for name in names]
        if None in sums:
            return None, None
        verified, accepted, drafted = sums
        length = 1 + accepted / verified if verified else 1.0
        rate = accepted / drafted if drafted else 0.0
        return length, rate


def _span_of(row: dict[str, Any], place: str) -> tuple[tuple, tuple[float, float] | None]:
    """A response's prompt and sample, and when it was asked for and there; None where the row does not say so."""
    key = (row.get("prompt"), row.get("sample"))
    times = row.get("generated_s")
    if times is None:
        return key, None
    are_times = isinstance(times, list) and len(times) == 2 and all(type(time) in (int, float) for time in times)
    expect(are_times, f"{place}, generated_s", "two times", times)
    return key, tuple(times)


def load_runs(directories: list[Path]) -> list[Run]:
    """Read run directories, and give the runs different names."""
    runs = [Run.load(directory) for directory in directories]
    counts = Counter()
    for run in runs:
        counts[run.name] += 1
        if counts[run.name] > 1:
            run.name = f"{run.name} {counts[run.name]}"
    return runs


def common_steps(runs: list[Run]) -> list[int]:
    """Training steps that all have; ReadError if there are none."""
    steps = set.intersection(*(set(run.steps) for run in runs))
    if not steps:
        has = "; ".join(f"{run.directory} has {run.steps[0]} to {run.steps[-1]}" for run in runs)
        raise ReadError(f"{has}: no training step in common: name runs that began alike")
    return sorted(steps)


def compare_responses(first: Run, second: Run) -> dict[int, tuple[int, int]]:
    """step -> (identical responses, responses that both runs have); empty where a run has not recorded them."""
    if not first.has_responses or not second.has_responses:
        return {}
    counts = {}
    for step in sorted(set(first.steps) & set(second.steps)):
        ours = _response_tokens(first, step)
        theirs = _response_tokens(second, step)
        common = ours.keys() & theirs.keys()
        identical = sum(np.array_equal(ours[key], theirs[key]) for key in common)
        counts[step] = (identical, len(common))
    return counts


def _response_tokens(run: Run, step: int) -> dict[tuple, np.ndarray]:
    """Token ids of a step's responses, by prompt and sample."""
    return {row[:2]: row.response_tokens for row in read_responses(run.directory, step)}


def pairs_by_seed(runs: list[Run]) -> list[list[Run]]:
    """The first two runs, and the pairs behind them of the same methods, each of one further seed."""
    pairs: dict[str, list[Run]] = {}
    methods = [run.name.partition(" ")[0] for run in runs]
    for n in range(0, len(runs) - 1, 2):
        pair = runs[n : n + 2]
        seed, baselines_seed = (str(run.config.get("seed")) for run in pair)
        if n == 0 or (seed == baselines_seed and methods[n : n + 2] == methods[:2]):
            pairs.setdefault(seed, pair)
    return [*pairs.values()]


def drafted_texts(run: Run) -> list[list[tuple[str, str]]]:
    """The last step's first prompt and samples of it, as pieces (text, "drafted", "given" or ""); none without sam,
    and, with a remark, without the model's tokenizer."""
    from sam.tools.replay import RecordedRequest, make_drafter

    if not run.has_responses or run.config["speculation"]["method"] != "sam":
        return []
    try:
        place = str(run.directory / CONFIG_FILE)
        with one_line(place, "no model and number of draft tokens"):
            model = str(run.config["actor_rollout_ref"]["model"]["path"])
            budget = np.array([run.config["speculation"]["num_speculative_tokens"]], np.int32)
            drafter = make_drafter("sam", "group", int(budget[0]))
        expect((Path(model) / "tokenizer.json").is_file(), place, "a model's folder with tokenizer.json", model)
        tokenizer = Tokenizer(model).whole
    except ReadError as error:
        run.remarks.append(f"{error}: left out")
        return []
    rows = read_responses(run.directory, run.steps[-1])
    samples = []
    for row in rows:
        if row.prompt == rows[0].prompt and len(row.response_tokens):
            spans = [[min(edge, SHOWN) for edge in span] for span in row.given_spans]
            samples.append(RecordedRequest(str(row.sample), row.response_tokens[:SHOWN], given=spans))
            drafter.start(str(row.sample), row.prompt_tokens)
    kinds = {sample.name: np.full(len(sample.response), "", "U7") for sample in samples}
    while live := [sample for sample in samples if not sample.finished]:
        for sample in live:
            begin = sample.accepted
            drafts = drafter.draft([sample.name], budget)
            accepted, generated, new = sample.verify(drafts.token_ids)
            kinds[sample.name][begin : begin + accepted] = "drafted"
            kinds[sample.name][begin + generated : sample.accepted] = "given"
            drafter.append([sample.name], new, np.array([0, len(new)]))
    prompt = tokenizer.decode(rows[0].prompt_tokens.tolist(), skip_special_tokens=False)
    pieces = [_pieces(tokenizer, sample.response, kinds[sample.name]) for sample in samples[:TEXTS]]
    return [[(prompt, "given")], *pieces]


def _pieces(tokenizer, tokens: np.ndarray, kinds: np.ndarray) -> list[tuple[str, str]]:
    ends = [*np.flatnonzero(kinds[1:] != kinds[:-1]) + 1, len(tokens)]
    texts = ["", *(tokenizer.decode(tokens[:end].tolist(), skip_special_tokens=False) for end in ends)]
    return [
        (text[len(before) :], str(kinds[end - 1])) for before, text, end in zip(texts, texts[1:], ends, strict=False)
    ]


def load_stock(directory: Path, run: Run) -> tuple[dict[str, Any] | None, str]:
    """What stock.json says of the run, and what to know of that; None where there is none or of another text."""
    path = directory / STOCK_FILE
    if not path.is_file():
        where = f"{run.directory} --output {directory}"
        return None, f"Stock vLLM was not measured: {MEASURE} {where}, then this report again"
    try:
        with one_line(str(path), f"not what {MEASURE} writes"):
            result = json_object(path)
            table_of(result)  # raises where it has no rows
            method = method_of(result)
            is_of_run = text_of(run, result["steps"]) == result["text"]
    except ReadError as error:
        return None, f"{error}: left out, measure again with {MEASURE}"
    if not is_of_run:
        return None, f"{path} is of another run's text and left out: measure again with {MEASURE}"
    policy = (run.config.get("speculation") or {}).get("policy")
    if method in ("sam", *WITH_DRAFT_MODEL) and policy != POLICY:
        return result, f"engines alone drafted with policy={POLICY}, the run with policy={policy}"
    return result, ""


def rows_of(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of the table by engine: stock, off and the run's method."""
    return {row["variant"]: row for row in result["rows"]}


def method_of(result: dict[str, Any]) -> str:
    """The engine that drafts."""
    return next(engine for engine in rows_of(result) if engine not in (STOCK, "off"))


def text_of(run: Run, steps: list[int]) -> str:
    """A name of the responses that a run recorded in these steps; empty where it has not."""
    paths = [responses_path(run.directory, step) for step in steps]
    if not paths or not all(path.is_file() for path in paths):
        return ""
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()[:16]
