"""Scenarios: requests, replicas, step costs and acceptance, from the command line's options."""

import argparse
from dataclasses import dataclass, field, replace
from functools import cache, partial

import numpy as np

from sam.record.responses import join, read_recording
from sam.replay.baselines import make_drafter
from sam.simulate import setups
from sam.simulate.acceptance import Acceptance, measure_on
from sam.simulate.engine import Cluster, Played
from sam.simulate.lengths import LogNormal, Round, recorded_round
from sam.simulate.rollout import Choice, Drawn, Outcome, Real, simulate
from sam.simulate.run import RecordedRun, fit_runs
from sam.switch.step_cost import StepCost


@dataclass
class Scenario:
    """A rollout that policies can be tried on.

    Attributes:
        name: for headings.
        rounds: played one after the other.
        steps: training step of each round, where there are several.
        choice: the default settings.
        acceptance: makes the drafts.
        idle_ms: milliseconds of each round in which no engine step runs.
    """

    name: str
    rounds: list[Round]
    cluster: Cluster
    cost: StepCost
    choice: Choice
    acceptance: Drawn | Real
    steps: list[int] = field(default_factory=list)
    idle_ms: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Tokens of all responses."""
        return sum(work.num_tokens for work in self.rounds)

    def play(self, choice: Choice, tail_threshold: int, progress=None) -> tuple[Outcome, list[Played]]:
        """Play all rounds; the idle time between them is included."""
        work = self.rounds, self.cluster, choice, self.cost, self.acceptance
        outcome, played = simulate(*work, tail_threshold, progress)
        idle = len(self.rounds) * self.idle_ms / 1e3
        return replace(outcome, seconds=outcome.seconds + idle, mean_seconds=outcome.mean_seconds + idle), played

    def seconds_by_step(self, played: list[Played]) -> np.ndarray:
        """float64 [training steps]: seconds of the rounds that `play` returned."""
        seconds = np.array([one.seconds.max() + self.idle_ms / 1e3 for one in played])
        steps = np.array(self.steps)
        return np.array([seconds[steps == step].sum() for step in dict.fromkeys(self.steps)])


def published(options: argparse.Namespace) -> Scenario:
    """A published set-up (`--setup`)."""
    setup, fitted = setups.SETUPS[options.setup], setups.load_step_cost(options.setup)
    lengths = LogNormal(int(fitted.fingerprint["mean_response_tokens"]), setups.CAP, setups.SIGMA, setups.CORRELATION)
    rounds = _draw(lengths, options.prompts or setup.prompts, options)
    cost = setups.load_step_cost(options.step_cost) if options.step_cost else fitted
    choice = replace(setup.choice, scope="group")
    return Scenario(options.setup, rounds, _changed(setup.cluster, options), cost, choice, drawn(options))


def log_normal(options: argparse.Namespace) -> Scenario:
    """Drawn lengths (`--log-normal`)."""
    mean, cap, sigma, correlation = options.log_normal
    lengths = LogNormal(mean, int(cap), sigma, correlation)
    rounds = _draw(lengths, options.prompts or 96, options)
    return Scenario("log-normal", rounds, _changed(Cluster(), options), _cost(options), Choice(), drawn(options))


def recorded(options: argparse.Namespace) -> Scenario:
    """Recorded responses (`--traces`), all as one round."""
    recording = join([read_recording(path, options.tokenizer) for path in options.traces])
    work = recorded_round(recording)
    acceptance = drawn(options) if options.acceptance else Real(partial(make_drafter, options.drafter))
    return Scenario("recording", [work], _changed(Cluster(), options), _cost(options), Choice(), acceptance)


def from_run(run: RecordedRun, cost: StepCost, admit_ms: float, idle_ms: float, drafter: str | None = None) -> Scenario:
    """A run's own responses and settings; drafts are made on its responses."""
    pairs = [(work, step) for step in run.seconds for work, _ in run.rounds(step)]
    rounds, steps = [work for work, _ in pairs], [step for _, step in pairs]
    method = "sam" if run.speculation.method == "off" else run.speculation.method
    drafts = Real(partial(make_drafter, drafter or method))
    return Scenario(str(run.directory), rounds, run.cluster(admit_ms), cost, run.choice, drafts, steps, idle_ms)


def recorded_run(options: argparse.Namespace, runs: list[RecordedRun]) -> list[Scenario]:
    """A scenario for each run, with the step costs of all of them unless a table or other runs are named."""
    fitted, idle_ms = fit_runs([RecordedRun.load(path) for path in options.cost_from] if options.cost_from else runs)
    cost = setups.load_step_cost(options.step_cost) if options.step_cost else fitted.cost
    scenarios = [from_run(run, cost, fitted.admit_ms, idle_ms, options.drafter_given) for run in runs]
    return [replace(one, cluster=_changed(one.cluster, options)) for one in scenarios]


def drawn(options: argparse.Namespace) -> Drawn:
    """Draw drafts from a table: `--acceptance`'s, one measured on `--acceptance`'s recordings, or a shipped one."""
    paths = options.acceptance

    @cache
    def table(k: int) -> Acceptance:
        if not paths:
            return setups.shipped_acceptance(options.drafter, k)
        if paths[0].suffix != ".json":
            return measure_on(paths, options.tokenizer, options.drafter, k)
        loaded = Acceptance.load(paths[0])
        if loaded.k != k:
            raise ValueError(f"{paths[0]}: of drafts of {loaded.k} tokens, not {k}: name a recording instead")
        return loaded

    return Drawn(table)


def _draw(lengths: LogNormal, prompts: int, options: argparse.Namespace) -> list[Round]:
    samples = options.samples or setups.SAMPLES
    return [lengths.draw(prompts, samples, setups.PROMPT_TOKENS, seed) for seed in range(options.seeds)]


def _cost(options: argparse.Namespace) -> StepCost:
    if not options.step_cost:
        raise ValueError(f"--step-cost is missing: a file, or one of {', '.join(setups.shipped_step_costs())}")
    return setups.load_step_cost(options.step_cost)


def _changed(cluster: Cluster, options: argparse.Namespace) -> Cluster:
    asked = {"replicas": options.replicas, "max_num_seqs": options.max_num_seqs, "dp_synchronous": options.lock_step}
    asked |= {"kv_tokens": options.kv_tokens, "read_ms": None if options.read_ms is None else options.read_ms / 1e3}
    return replace(cluster, **{name: value for name, value in asked.items() if value is not None})
