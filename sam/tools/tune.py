"""`sam tune RUN_DIR`: recommends policy, k and threshold from a recorded run.

Step costs are fitted to the run's engine steps, and to those of the run beside it without speculation, its reference,
where there is one; `--cost-from` adds others. Its rollouts are then simulated with every candidate, drafting on its
responses (sam.tools.simulate), and each simulated training step is scaled as the run's own setting must be to take
what was measured. So the own setting has the measured gain, and others what they are faster or slower than it. The
gain's interval is a bootstrap over training steps, widened, for another setting than the own, by the simulation's
error.

`sam tune --setup NAME` simulates a published set-up, of which there is no run: requests and drafts are drawn, and all
combinations of policies, draft lengths, thresholds and scopes are tried. docs/bench.md says what is assumed.
"""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from sam.command import Parser, laid_out, number, run_command, waiting
from sam.config import POLICIES
from sam.tools.simulate import rollout
from sam.tools.simulate.rollout import SCOPES, SETUPS, Choice
from sam.tools.simulate.run import FittedCost, RecordedRun, fit_runs
from sam.tools.simulate.workload import shipped_acceptance

DRAFT_LENGTHS = (2, 3, 4, 6, 8)
THRESHOLDS = (4, 8, 16, 32, 64, 128, 256)
TOKENS = 1_000_000  # of responses to simulate with every candidate, if that leaves two training steps
RESAMPLES = 4000
INTERVAL = (5, 95)
SHOWN = 8  # candidates
SAME = 1.02  # times as fast as the run's own setting, up to which another one is not worth a change
HEADER = ("policy", "scope", "seconds", "speed-up", "drafting", "length", "wasted")


class Trial(NamedTuple):
    """A candidate, its seconds in each training step (float64 [n]), and the draft tokens it wasted in all of them."""

    choice: Choice
    seconds: np.ndarray
    wasted: int
    accept_length: float

    def total(self) -> float:
        """Seconds of all training steps."""
        return float(self.seconds.sum())


def candidates(own: Choice, most_running: int, ks: list[int], thresholds: list[int]) -> list[Choice]:
    """The run's own setting, and all combinations to try; of the thresholds at or above the most running requests only
    the smallest."""
    reached = [threshold for threshold in thresholds if threshold < most_running]
    reached += [threshold for threshold in thresholds if threshold >= most_running][:1]
    switched = [replace(own, policy="threshold", k=k, threshold=threshold) for k in ks for threshold in reached]
    goodput = [replace(own, policy="goodput", k=k) for k in ks if k >= min(4, max(ks))]
    return [own, *(choice for choice in switched + goodput if choice != own)]


def choose_steps(run: RecordedRun, count: int | None, reference: RecordedRun | None = None) -> RecordedRun:
    """The run with `count` of its training steps, of those that the reference has, evenly spread; None: enough steps
    for TOKENS tokens."""
    steps = [step for step in run.seconds if reference is None or step in reference.seconds]
    if count is None:
        count = max(2, TOKENS // max(1, sum(work.num_tokens for work, _ in run.rounds(steps[0]))))
    kept = np.unique(np.linspace(0, len(steps) - 1, min(count, len(steps))).round().astype(int))
    return replace(run, seconds={steps[i]: run.seconds[steps[i]] for i in kept})


@contextmanager
def _progress(tokens: int, choices: list[Choice]) -> Iterator[Callable[[int], object]]:
    """Gives what is to be called with the tokens simulated: it moves a bar or, off a terminal, what goes on is said."""
    what = f"simulating {len(choices)} settings"
    shown = nullcontext() if sys.stderr.isatty() else waiting(what)
    with shown, tqdm(total=tokens * len(choices), unit="tok", desc="settings", mininterval=2.0, disable=None) as bar:
        yield bar.update


def play(run: RecordedRun, choices: list[Choice], fitted: FittedCost, idle_ms: float) -> list[Trial]:
    """Simulate a run's rollouts, of which `idle_ms` a round are in no engine step, with each of `choices`."""
    pairs = [(work, step) for step in run.seconds for work, _ in run.rounds(step)]
    rounds = [work for work, _ in pairs]
    step_of = np.array([step for _, step in pairs])
    cluster = run.cluster(fitted.admit_ms)
    trials = []
    with _progress(sum(work.num_tokens for work in rounds), choices) as progress:
        for choice in choices:
            played = rollout.simulate(rounds, cluster, choice, fitted.cost, rollout.real(), progress)
            seconds = np.array([rollout.seconds(timelines) + idle_ms / 1e3 for timelines in played])
            by_step = np.array([seconds[step_of == step].sum() for step in run.seconds])
            outcome = rollout.summarize(played)
            trials.append(Trial(choice, by_step, outcome["wasted"], outcome["accept_length"]))
    return trials


def gains(without: np.ndarray, with_: np.ndarray, error: float) -> tuple[float, float, float]:
    """Speed-up, and the ends of its interval over resampled training steps, of which seconds are given (float [n]).

    `error`: standard deviation of the logarithm of simulated over measured seconds.
    """
    chance = np.random.default_rng(0)
    rows = chance.integers(len(without), size=(RESAMPLES, len(without)))
    ratios = without[rows].sum(axis=1) / with_[rows].sum(axis=1)
    low, high = np.percentile(ratios * np.exp(error * chance.standard_normal(RESAMPLES)), INTERVAL)
    return float(without.sum() / with_.sum()), float(low), float(high)


def override(choice: Choice) -> str:
    """Write a candidate as overrides for the command line of the recipe."""
    words = f"speculation=sam speculation.policy={choice.policy} speculation.num_speculative_tokens={choice.k}"
    if choice.policy == "threshold":
        words += f" speculation.batch_size_threshold={choice.threshold}"
    return words


class Measured(NamedTuple):
    """What a run and its reference took in each training step that is simulated, float64 [n] seconds; `reference` is
    None where there is none. `slower`, `reference_slower`: times that the machine was so, which is no error of the
    simulation."""

    own: np.ndarray
    reference: np.ndarray | None
    slower: np.ndarray | float = 1.0
    reference_slower: np.ndarray | float = 1.0

    def gain_of(self, without: Trial, own: Trial, chosen: Trial) -> tuple[float, float, float]:
        """Speed-up over no speculation and its interval; `without` and `own` are simulated."""
        scale = self.own / own.seconds
        if self.reference is None:
            error = _spread(own.seconds * self.slower, self.own)
            return gains(without.seconds * scale, chosen.seconds * scale, error)
        if chosen is own:
            return gains(self.reference, self.own, error=0.0)
        simulated = without.seconds * self.reference_slower / (own.seconds * self.slower)
        error = _spread(simulated, self.reference / self.own)
        return gains(self.reference, chosen.seconds * scale, error)


def _spread(simulated: np.ndarray, measured: np.ndarray) -> float:
    """Root mean square of the logarithm of one over the other."""
    return float(np.sqrt(np.mean(np.log(simulated / measured) ** 2)))


def measured_of(
    run: RecordedRun, reference: RecordedRun | None, runs: list[RecordedRun], fitted: FittedCost
) -> Measured:
    """What was measured in the training steps of `run`, the first of `runs`, to which the costs are fitted."""
    slower = np.array([fitted.slower[0, step] for step in run.seconds])
    own = np.array(list(run.seconds.values()))
    if reference is None:
        return Measured(own, None, slower)
    number = next(i for i, other in enumerate(runs) if other is reference)
    return Measured(
        own=own,
        reference=np.array([reference.seconds[step] for step in run.seconds]),
        slower=slower,
        reference_slower=np.array([fitted.slower[number, step] for step in run.seconds]),
    )


def reference_of(run: RecordedRun, others: list[RecordedRun]) -> RecordedRun | None:
    """One of the others without speculation, or one that lies beside the run; None for a run without it."""
    if run.config["speculation"]["method"] == "off":
        return None
    return next((other for other in others if other.is_reference_of(run)), None) or run.reference_beside()


def tune(options: argparse.Namespace) -> Iterator[str]:
    """Lines about the fastest candidates for a run; the last one is the override."""
    with waiting("reading engine steps and fitting step costs to them"):
        whole = RecordedRun.load(options.run)
        others = [RecordedRun.load(other) for other in options.cost_from]
        reference = reference_of(whole, others)
        if reference and all(reference.directory != other.directory for other in others):
            others.append(reference)
        run = choose_steps(whole, options.steps, reference)
        runs = [whole, *others]
        fitted, idle_ms = fit_runs(runs)
        most = max(int(steps.running.max()) for step in run.seconds for _, steps in run.rounds(step))
    choices = candidates(run.choice, most, options.k, options.threshold)
    without, *trials = play(run, [replace(run.choice, policy="never"), *choices], fitted, idle_ms)
    itself = trials[0]
    measured = measured_of(run, reference, runs, fitted)
    for trial in sorted(trials, key=Trial.total)[:SHOWN]:
        speedup, _low, _high = measured.gain_of(without, itself, trial)
        length = f"acceptance length {trial.accept_length:.2f}, {trial.wasted} draft tokens wasted"
        mark = ", the run's own" if trial is itself else ""
        yield f"{trial.choice.label:20} speed-up {speedup:.3f}, {length}{mark}"
    yield f"step costs: {fitted.cost.source}"
    took = measured.own.sum()
    simulated = itself.total()
    seconds = f"{took:.1f} s measured, {simulated:.1f} s simulated ({simulated / took - 1:+.1%})"
    yield f"the run itself: {seconds}, {len(run.seconds)} training steps"
    if reference:
        ratios = f"{measured.reference.sum() / took:.2f}x measured, {without.total() / simulated:.2f}x simulated"
        yield f"over {reference.directory}, without speculation: {ratios}"
    yield from recommended(measured, without, trials)
    yield from doubts(run, reference, fitted)
    yield answer(measured, without, trials)


def chosen_of(trials: list[Trial]) -> Trial:
    """The fastest, or the first, the run's own, where that is as fast."""
    best = min(trials, key=Trial.total)
    return trials[0] if trials[0].total() <= SAME * best.total() else best


def recommended(measured: Measured, without: Trial, trials: list[Trial]) -> Iterator[str]:
    """What the fastest setting brings."""
    chosen = chosen_of(trials)
    gain, low, high = measured.gain_of(without, trials[0], chosen)
    interval = f"{gain:.2f}x ({low:.2f} to {high:.2f} in nine of ten resamplings)"
    yield f"expected of the rollout: {interval}, against speculation=off"
    if chosen is trials[0]:
        than = f"none of {len(trials) - 1} others is more than {SAME - 1:.0%} faster"
        yield f"the run's own setting is already the best: {than}"
    if low <= 1.0:
        yield "speculation does not pay for certain here"


def answer(measured: Measured, without: Trial, trials: list[Trial]) -> str:
    """The override."""
    chosen = chosen_of(trials)
    _, low, _ = measured.gain_of(without, trials[0], chosen)
    return override(chosen.choice) if low > 1.0 else "speculation=off"


def doubts(run: RecordedRun, reference: RecordedRun | None, fitted: FittedCost) -> Iterator[str]:
    """What makes the figures less certain than they look."""
    if reference is None and run.choice.policy != "never":
        yield (
            f"no run without speculation beside it in {run.directory.resolve().parent}: what is gained over it is a "
            "guess; run the same with speculation=off there"
        )
    if not fitted.drafts_seen:
        yield "no draft was ever verified: what that costs is a guess; add a run with drafts with --cost-from"
    if fitted.plain_from > 4:
        plain = f"no steps without drafts of under {fitted.plain_from} requests: what they take is a guess"
        yield f"{plain}; add a run without speculation with --cost-from"
    if len(run.seconds) < 5:
        yield "fewer than five training steps: the interval is too narrow to be trusted"


def play_setup(options: argparse.Namespace) -> Iterator[str]:
    """A table of all choices of a published set-up, over no speculation."""
    cluster, work, cost, k, threshold = rollout.load_setup(options.setup, options.prompts)
    ks = options.k or [k]
    thresholds = options.threshold or [threshold]
    choices = [Choice("never", ks[0], thresholds[0], "request")]
    for policy, k, scope, threshold in itertools.product(options.policy, ks, options.scope, thresholds):
        if policy != "never" and (policy == "threshold" or threshold == thresholds[0]):
            choices.append(Choice(policy, k, threshold, scope))
    outcomes = []
    with _progress(work.num_tokens, choices) as progress:
        for choice in choices:
            played = rollout.simulate([work], cluster, choice, cost, rollout.drawn(shipped_acceptance), progress)
            outcomes.append(rollout.summarize(played))
    rows = []
    for choice, outcome in zip(choices, outcomes, strict=True):
        rows.append(
            [
                choice.label,
                choice.scope,
                f"{outcome['seconds']:.1f}",
                f"{outcomes[0]['seconds'] / outcome['seconds']:.3f}",
                f"{outcome['switched_on']:.2f}",
                f"{outcome['accept_length']:.3f}",
                str(outcome["wasted"]),
            ]
        )
    lock_step = " in lock-step" if cluster.dp_synchronous else ""
    yield f"{len(work)} requests, {work.num_tokens} tokens, {cluster.replicas} replicas{lock_step}"
    yield f"step costs: {cost.source}"
    yield from laid_out(HEADER, rows)


def main(arguments: list[str]) -> int:
    is_setup = any(word.partition("=")[0] == "--setup" for word in arguments)
    epilog = "" if is_setup else "`sam tune --setup NAME` simulates a published set-up: with --help more"
    what = "How long a published set-up's rollout takes" if is_setup else "Recommends settings from a recorded run"
    parser = Parser(prog="sam tune", description=f"{what}, by simulation.", epilog=epilog)
    positive = number(1)
    parser.add_argument("--k", nargs="+", type=positive, help="draft tokens to try")
    parser.add_argument("--threshold", nargs="+", type=number(0), help="running requests, of the threshold policy")
    if is_setup:
        parser.add_argument("--setup", required=True, choices=SETUPS, help="its step costs are FITTED")
        parser.add_argument("--prompts", type=positive, help="of a round")
        parser.add_argument("--policy", nargs="+", choices=POLICIES, default=["threshold", "goodput"])
        parser.add_argument("--scope", nargs="+", choices=SCOPES, default=["group"], help="whose text a drafter sees")
        return run_command(lambda: play_setup(parser.parse_args(arguments)))
    parser.add_argument("run", type=Path, help="run directory of `sam run`")
    parser.add_argument("--steps", type=positive, help=f"training steps to play (default: enough for {TOKENS} tokens)")
    parser.add_argument("--cost-from", nargs="+", type=Path, default=[], help="more runs to fit step costs to")
    parser.set_defaults(k=DRAFT_LENGTHS, threshold=THRESHOLDS)
    return run_command(lambda: tune(parser.parse_args(arguments)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
