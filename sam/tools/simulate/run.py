"""A recorded training run as the simulator reads it, and step costs fitted to the engine steps that it recorded."""

import math
import operator
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from sam.config import SpeculationConfig
from sam.reading import ReadError, expect, one_line
from sam.record import responses as run_directory
from sam.record.engine_steps import EngineSteps
from sam.record.responses import by_prompt
from sam.switch.step_cost import StepCost
from sam.tools.simulate.rollout import Choice, Cluster
from sam.tools.simulate.workload import Round, recorded_round

FEWEST_STEPS = 20
KNOTS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096)
CONTEXT_UNIT = 1024.0
LONGEST_DRAFT = 15  # tokens up to which the table goes
REWEIGHTINGS = 8
OUTLIER = 2.0  # times the median error, beyond which a step counts less and less
RARE = 5  # percent of the steps without drafts, which may happen to have found none
SEEN_DRIFT = 1.2  # times that the slowest training step is slower than the fastest, from which it is said
STALL = 20.0  # times the fitted milliseconds, beyond which a step was held up by something else and does not count


@dataclass(frozen=True)
class RecordedRun:
    """A run directory of `sam run`."""

    directory: Path
    config: dict  # its config.yaml
    seconds: dict[int, float]  # of the rollout of each training step whose responses and engine steps are there

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read a run directory.

        Raises:
            ReadError: no such run, something in it cannot be read, or none of its training steps is recorded.
        """
        for name in (run_directory.CONFIG_FILE, run_directory.METRICS_FILE):
            if not (directory / name).is_file():
                raise ReadError(f"{directory}: no {name} there; expected a run directory of sam run")
        config = run_directory.read_config(directory)
        place = str(directory / run_directory.CONFIG_FILE)
        with one_line(place, "not this version's settings"):
            SpeculationConfig.from_dict(config["speculation"])
            sections = config["actor_rollout_ref"]["rollout"], config.get("trainer", {})
        are_settings = all(isinstance(section, dict) for section in sections)
        expect(are_settings, place, "settings of rollout and trainer", sections)
        seconds = {}
        for step, row in sorted(run_directory.read_metrics(directory).items()):
            took = row.get("rollout/seconds", 0)
            files = EngineSteps.path(directory, step), run_directory.responses_path(directory, step)
            if took > 0 and all(file.is_file() for file in files):
                seconds[step] = took
        if not seconds:
            raise ReadError(f"{directory}: no training step with rollouts/ and engine_steps/ has finished there")
        return cls(directory, config, seconds)

    @property
    def is_simulated(self) -> bool:
        """Whether its rollouts can be simulated as they ran."""
        return self.config["speculation"]["method"] in ("sam", "off")

    @property
    def choice(self) -> Choice:
        """The run's own settings.

        Raises:
            ValueError: another drafter than sam.
        """
        own = SpeculationConfig.from_dict(self.config["speculation"])
        if not self.is_simulated:
            raise ValueError(f"{self.directory}: drafts of {own.method} are not simulated: name a run with sam or off")
        policy = own.policy if own.method == "sam" else "never"
        return Choice(policy, own.num_speculative_tokens, own.batch_size_threshold, own.scope)

    def is_reference_of(self, other: "RecordedRun") -> bool:
        """Whether it ran as `other` did, with training steps of the same number among its own, but without drafts."""
        if self.config["speculation"]["method"] != "off" or not self.seconds.keys() & other.seconds.keys():
            return False
        return self._circumstances() == other._circumstances()

    def _circumstances(self) -> list:
        """What decides how long a rollout without drafts takes."""
        actor = self.config.get("actor_rollout_ref") or {}
        rollout = actor.get("rollout") or {}
        trainer = self.config.get("trainer") or {}
        return [
            self.config.get("seed"),
            self.config.get("data"),
            self.config.get("algorithm"),
            (actor.get("model") or {}).get("path"),
            rollout.get("n"),
            rollout.get("temperature"),
            rollout.get("max_num_seqs"),
            trainer.get("device"),
            trainer.get("nnodes"),
            trainer.get("n_gpus_per_node"),
        ]

    def reference_beside(self) -> "RecordedRun | None":
        """The first run in the same folder that is a reference of this one."""
        own = self.directory.resolve()
        for folder in sorted(own.parent.iterdir()):
            if folder != own and (folder / run_directory.CONFIG_FILE).is_file():
                with suppress(ReadError):
                    other = RecordedRun.load(folder)
                    if other.is_reference_of(self):
                        return other
        return None

    def cluster(self, admit_ms: float = 0.0) -> Cluster:
        """Return the machines that it ran on."""
        settings = self.config["actor_rollout_ref"]["rollout"]
        trainer = self.config.get("trainer", {})
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "data_parallel_size")
        with one_line(str(self.directory / run_directory.CONFIG_FILE), "not this version's settings"):
            *shape, ranks = (operator.index(settings.get(name) or 1) for name in names)
            slots = operator.index(settings.get("max_num_seqs") or 1024)
            if slots < 1:
                raise ValueError(f"rollout.max_num_seqs={slots}: expected a number above 0")
            world = math.prod(operator.index(trainer.get(name) or 1) for name in ("nnodes", "n_gpus_per_node"))
            engines = max(1, world // (ranks * math.prod(shape)))
        if ranks > 1 and engines > 1:
            raise ValueError(f"{self.directory}: {engines} engines of {ranks} data-parallel ranks: not simulated yet")
        return Cluster(max(ranks, engines), slots, dp_synchronous=ranks > 1, admit_ms=admit_ms)

    def rounds(self, step: int) -> list[tuple[Round, EngineSteps]]:
        """A training step's rounds of generation, with the arrivals and the engine steps of its first replica."""
        rows = run_directory.read_responses(self.directory, step)
        numbers = sorted({row.round for row in rows})
        parts = EngineSteps.load(self.directory, step).split_rounds(len(numbers))
        is_whole = len(parts) == len(numbers) and all(part.running.any() for part in parts)
        path = str(EngineSteps.path(self.directory, step))
        expect(is_whole, path, f"steps with requests in each of {len(numbers)} generation rounds", len(parts))
        pairs = []
        for number, part in zip(numbers, parts, strict=True):
            recording = by_prompt(row[3:] for row in rows if row.round == number)
            recording.check_generated(self.directory)
            count = sum(len(text) > 0 for samples in recording.responses for text in samples)
            pairs.append((recorded_round(recording, arrivals(part, count)), part))
        return pairs


def arrivals(steps: EngineSteps, requests: int) -> np.ndarray:
    """float64 [requests], milliseconds after the first step began at which requests were there.

    Running requests rise while they come. What has not come when they are most has waited, or come in the place of
    those that had finished: it is spread over the same time.
    """
    top = int(np.argmax(steps.running)) + 1
    came = np.cumsum(np.maximum(0, np.diff(steps.running[:top], prepend=0)))
    at = np.searchsorted(came, (np.arange(requests) + 0.5) * came[-1] / requests)
    return 1e3 * (steps.start_s[at] - steps.start_s[0])


class FittedCost(NamedTuple):
    """A table fitted to recorded steps; the sum of its costs over them is the recorded sum."""

    cost: StepCost
    admit_ms: float  # that a new request adds to its first step
    drafts_seen: bool  # whether any step verified drafts; if not, a draft token is taken to cost as much as a request
    plain_from: int  # fewest requests of a step without drafts, once all have come: for fewer, its cost is a guess
    slower: dict[tuple[int, int], float] | None = None  # times that the machine was so in a run's training step


def fit_runs(runs: list[RecordedRun]) -> tuple[FittedCost, float]:
    """Fit step costs to all recorded engine steps of runs of one machine; returns also the milliseconds of a round in
    which no engine step runs.

    A machine may be slower in some training steps than in others. That is taken out, with the run's time kept: the
    costs are of the run's mean speed.
    """
    parts = []  # of each round the columns of fit_from_steps
    trained = []  # and its run and training step
    idle = 0.0
    for number, run in enumerate(runs):
        cluster = run.cluster()
        for step, seconds in run.seconds.items():
            idle += seconds
            for work, steps in run.rounds(step):
                came = np.maximum(0, np.diff(steps.running, prepend=0))
                context = np.zeros(len(came))
                if len(work) <= cluster.replicas * cluster.max_num_seqs:  # all began together
                    each = np.cumsum(steps.emitted / np.maximum(1, steps.running))
                    context = work.prompt_tokens.mean() + np.append(0.0, each[:-1])
                parts.append(np.array([steps.running, steps.drafted, steps.step_ms, came, context], np.float64))
                trained.append((number, step))
                idle -= steps.seconds
    fitted = fit_from_steps(np.concatenate(parts, axis=1))
    slower = slowness(fitted, parts, trained)
    for part, times in zip(parts, slower, strict=True):
        part[2] /= times
    fitted = fit_from_steps(np.concatenate(parts, axis=1))
    drift = max(slower) / min(slower)
    if drift > SEEN_DRIFT:
        note = f"the machine was up to {drift:.1f}x slower in some training steps, which is taken out"
        fitted = fitted._replace(cost=replace(fitted.cost, source=f"{fitted.cost.source}; {note}"))
    idle_ms = max(0.0, 1e3 * idle / len(parts))
    return fitted._replace(slower=dict(zip(trained, slower, strict=True))), idle_ms


def slowness(fitted: FittedCost, parts: list[np.ndarray], trained: list[tuple[int, int]]) -> list[float]:
    """How many times longer than in its run's mean the engine steps of each part's training step took, for what they
    cost by the table."""
    took: Counter = Counter()
    cost: Counter = Counter()
    for part, (run, step) in zip(parts, trained, strict=True):
        running, drafted, step_ms, admitted, context = part[:, part[0] > 0]
        rows = zip(running, running + drafted, context, strict=True)
        table = np.array([fitted.cost.step_ms(*row)[0] for row in rows]) + fitted.admit_ms * admitted
        counted = step_ms <= STALL * table
        for part_of in (run, (run, step)):
            took[part_of] += float(step_ms[counted].sum())
            cost[part_of] += float(table[counted].sum())

    def times(run: int, step: int) -> float:
        if not took[run, step]:
            return 1.0
        return took[run, step] * cost[run] / (cost[run, step] * took[run])

    return [times(run, step) for run, step in trained]


def fit_from_steps(columns: np.ndarray) -> FittedCost:
    """Fit h(rows) + a x [any drafts] + b x requests + c x requests x context + d x admitted, all rising.

    h is linear between KNOTS and goes on with its last slope. Steps that something else held up count little for the
    shape, but the table is scaled so that the time of all steps is what it was, without the worst of them (STALL).

    Args:
        columns: float64 [5, steps]: requests, draft tokens verified, milliseconds, requests that came with the step,
            and mean tokens of a request.

    Raises:
        ValueError: too few steps.
    """
    columns = columns[:, (columns[0] > 0) & (columns[2] > 0)]
    running, drafted, step_ms, admitted, context = columns
    count = len(running)
    if count < FEWEST_STEPS:
        raise ValueError(f"{count} recorded engine steps: expected at least {FEWEST_STEPS} to fit step costs to")
    drafts_seen = bool((drafted > 0).any())
    rows = running + drafted
    # The last piece takes the upper half of the rows, since its slope goes on beyond them; a piece that no step lies in
    # would get a slope from nowhere.
    knots = [k for k in KNOTS if k == 1 or k < rows.max() / 2]
    pieces = zip(knots, [*knots[1:], np.inf], strict=True)
    knots = np.array([k for k, end in pieces if k == 1 or ((rows > k) & (rows <= end)).any()], dtype=np.float64)

    def terms(requests, rows, is_drafting, context) -> list[np.ndarray]:
        lies_in = [np.clip(rows, k, end) - k for k, end in zip(knots, np.append(knots[1:], np.inf), strict=True)]
        # Without drafts a token's cost cannot be told from a request's.
        return [np.ones_like(rows), *lies_in, is_drafting, requests * drafts_seen, requests * context / CONTEXT_UNIT]

    features = np.stack([*terms(running, rows, drafted > 0, context), admitted], axis=1).astype(np.float64)
    coefficients = _robust(features, step_ms)
    predicted = features @ coefficients
    counted = step_ms <= STALL * predicted
    coefficients *= step_ms[counted].sum() / predicted[counted].sum()
    error = np.abs(features @ coefficients - step_ms)[counted].mean() / step_ms[counted].mean()

    requests = np.array([*(k for k in KNOTS if k < running.max()), int(running.max())])
    axes = requests, np.arange(1, LONGEST_DRAFT + 2), np.unique([1, max(1, int(context.max()))])
    r, m, c = (axis.astype(np.float64) for axis in np.meshgrid(*axes, indexing="ij"))
    cells = sum(weight * term for weight, term in zip(coefficients, terms(r, r * m, m > 1, c), strict=False))
    source = f"fitted to {count} recorded engine steps, mean error {error:.0%}"
    if not counted.all():
        source += f", {(~counted).sum()} stalls left out"
    if not drafts_seen:
        source += "; no drafts seen: a draft token taken to cost what a request costs"
    plain = running[(drafted == 0) & (admitted == 0)]
    plain_from = int(np.percentile(plain, RARE)) if len(plain) else int(running.max())
    cost = StepCost(*axes, np.maximum(cells, 1e-3), source=source)
    return FittedCost(cost, float(coefficients[-1]), drafts_seen, plain_from)


def _robust(features: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Coefficients of at least 0, by least squares reweighted as Huber does."""
    scale = np.maximum(np.abs(features).max(axis=0), 1e-12)
    unit = features / scale
    weights = np.ones(len(target))
    for _ in range(REWEIGHTINGS):
        root = np.sqrt(weights)
        coefficients = least_squares_without_negative_terms(unit * root[:, None], target * root)
        error = np.abs(unit @ coefficients - target)
        weights = np.minimum(1.0, OUTLIER * max(np.median(error), 1e-9) / np.maximum(error, 1e-9))
    return coefficients / scale


def least_squares_without_negative_terms(columns: np.ndarray, target: np.ndarray) -> np.ndarray:
    """float64 [terms]: least squares of `columns` (float [n, terms]) in which the most negative term is left out until
    none is negative: not the optimum (Lawson and Hanson, Solving Least Squares Problems, chapter 23), but near it."""
    used = list(range(columns.shape[1]))
    result = np.zeros(columns.shape[1])
    while True:
        terms = np.linalg.lstsq(columns[:, used], target, rcond=None)[0]
        if len(used) == 1 or terms.min() >= 0:
            result[used] = np.maximum(terms, 0.0)
            return result
        del used[int(np.argmin(terms))]
