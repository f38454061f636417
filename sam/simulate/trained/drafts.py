"""A trained drafter in a simulated rollout: what its passes take, what of its tokens is accepted, how it grows stale.

Alone (`eagle3`, `draft_model`: a name for what the options describe, simulated alike) or beside a drafter that copies
text (`hybrid`). The engine's own planner (sam.switch.draft_passes) decides in every step whether its passes run, how
many, and for which requests.
"""

import argparse
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np

from sam.jit import compiled
from sam.simulate.acceptance import hashed
from sam.simulate.lengths import Round
from sam.switch.draft_passes import PassCost, plan_passes
from sam.switch.policy import Policy, StepState
from sam.switch.step_cost import StepCost

ALONE = ("eagle3", "draft_model")
TRAINED = (*ALONE, "hybrid")
# Of a plain step of the target: six passes of a one-layer head and verifying took 43 % of a step of a model of 62
# layers (MiniCPM3-4B at one request: 2.44 tokens a step, 1.71 times as fast: https://github.com/vllm-project/vllm/pull/24243).
PASS_SHARE = 0.07
# A head that was never retrained: 2.53 to 2.56 tokens a step over 36 training steps, with no trend
# (https://github.com/marin-community/marin/issues/9114).
DECAY = 0.0
SEED = 1 << 20  # beyond any round's number: no random number is shared with the drafter that copies text
NO_TOKENS = np.empty(0, np.float32)


@dataclass(frozen=True)
class TrainedDrafter:
    """What a trained drafter's tokens are worth and cost.

    Attributes:
        shares: share of the draft tokens accepted at each position, of those accepted up to there, by the policy that
            it was trained for; the last one holds for all later positions.
        pass_share: milliseconds of a pass, as a share of a step of the target without drafts.
        decay: share of `shares` that is lost with each training step.
        staleness: training steps since it was trained.

    Raises:
        ValueError: a value outside its range.

    Example:
        >>> TrainedDrafter((0.8, 0.5)).expected(3)
        array([0.8, 0.4, 0.2])
        >>> TrainedDrafter((0.8,), decay=0.5).older(1).expected(1)
        array([0.4])
    """

    shares: tuple[float, ...]
    pass_share: float = PASS_SHARE
    decay: float = DECAY
    staleness: int = 0

    def __post_init__(self) -> None:
        if not self.shares or not all(0 <= share <= 1 for share in self.shares):
            raise ValueError(f"--draft-acceptance {list(self.shares)}: expected shares from 0 to 1, one a position")
        for name, value in (("--pass-share", self.pass_share), ("--staleness", self.staleness)):
            if not value >= 0:
                raise ValueError(f"{name} {value}: expected 0 or more")
        if not 0 <= self.decay <= 1:
            raise ValueError(f"--decay {self.decay}: expected a share from 0 to 1")

    def older(self, steps: int) -> Self:
        """The same after further training steps."""
        return replace(self, staleness=self.staleness + steps)

    def expected(self, k: int) -> np.ndarray:
        """float64 [k]: probability that a token and all before it are accepted."""
        shares = np.array([self.shares[min(i, len(self.shares) - 1)] for i in range(k)])
        return np.cumprod(shares * (1.0 - self.decay) ** self.staleness)

    def pass_cost(self, cost: StepCost) -> PassCost:
        """What passes take where the target takes `cost`, in its shortest context.

        A pass over more tokens than the table has requests, as when a prompt is read, costs what its draft tokens do.
        """
        most, longest = int(cost.requests[-1]), int(cost.tokens_per_request[-1])
        plain = [(n, float(cost.step_ms(n, np.array([n]), cost.context[0])[0])) for n in cost.requests.tolist()]
        if longest > 1:
            largest = most * longest
            plain.append((largest, float(cost.step_ms(most, np.array([largest]), cost.context[0])[0])))
        sizes, milliseconds = map(np.array, zip(*plain, strict=True))
        return PassCost(sizes, self.pass_share * milliseconds)


class Proposed(NamedTuple):
    """Drafts of a batch: acceptance float32 [total], offsets int64 [requests + 1]."""

    acceptance: np.ndarray
    offsets: np.ndarray


class TrainedDrafts:
    """Drafts of a replica with a trained drafter.

    What the engine learns of its acceptance is taken as known. Whether a token is accepted does not depend on whether
    copied text would have been.

    Args:
        text: drafts copied from text (sam.simulate.drafting); None: the trained drafter is alone.
        seed: another seed accepts other tokens.

    Attributes:
        milliseconds: of the passes of the last step.
    """

    def __init__(self, text, drafter: TrainedDrafter, cost: PassCost, work: Round, seed: int = 0):
        self._text, self._drafter, self._cost, self._seed = text, drafter, cost, SEED + seed
        # They find out where text and drafter know the same tokens, which here they do not, and by a real clock.
        cost.trials = None
        self._prompt_tokens = work.prompt_tokens
        self._read = np.zeros(len(work), np.int64)  # tokens of each request that its KV cache holds
        self.milliseconds = 0.0

    def start(self, request: int) -> None:
        self._read[request] = 0  # after a preemption or a move it is read again
        if self._text:
            self._text.start(request)

    def finish(self, request: int) -> None:
        if self._text:
            self._text.finish(request)

    def append(self, requests, generated) -> None:
        if self._text:
            self._text.append(requests, generated)

    def draft(self, requests, generated, budgets, min_acceptance) -> tuple[np.ndarray, np.ndarray]:
        """The drafts copied from text, which `replace` may replace."""
        self._batch = requests, generated, budgets
        self._wanted, self.milliseconds = np.zeros(len(requests), bool), 0.0
        if self._text:
            return self._text.draft(requests, generated, budgets, min_acceptance)
        return NO_TOKENS, np.zeros(len(requests) + 1, np.int64)

    def replace(self, policy: Policy, state: StepState, acceptance, offsets) -> tuple[np.ndarray, np.ndarray]:
        """Of the drafts just made those that the trained drafter's replace, where that pays; sets `milliseconds`."""
        requests, generated, budgets = self._batch
        cumulative = self._drafter.expected(int(budgets.max(initial=0)))
        expected = np.where(np.arange(len(cumulative)) < budgets[:, None], cumulative, 0.0)
        lengths = self._prompt_tokens[requests] + generated
        drafts, missing = Proposed(acceptance, offsets), lengths - self._read[requests]
        plan = plan_passes(policy, state, drafts, expected, missing, self._cost, len(cumulative))
        self._wanted, self.milliseconds = plan.wanted, plan.milliseconds
        if plan.count == 0:
            return acceptance, offsets
        self._read[requests[plan.wanted]] = lengths[plan.wanted]
        return combined(acceptance, offsets, expected, plan.wanted, plan.count)

    def verify(self, lengths: np.ndarray) -> np.ndarray:
        """int64 [requests]: tokens accepted of the first `lengths` tokens of each draft."""
        requests, generated, budgets = self._batch
        cumulative = self._drafter.expected(int(budgets.max(initial=0)))
        own = np.minimum(lengths, draw_accepted(requests, generated, cumulative, self._seed))
        if self._text is None:
            return np.where(self._wanted, own, 0)
        return np.where(self._wanted, own, self._text.verify(np.where(self._wanted, 0, lengths)))


def combined(acceptance, offsets, expected, wanted, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Acceptance and offsets of a batch in which the trained drafter's first `count` tokens replace some drafts."""
    lengths = np.where(wanted, count, np.diff(offsets))
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    joined = np.empty(ends[-1], np.float32)
    for i, own in enumerate(wanted):
        joined[ends[i] : ends[i + 1]] = expected[i, :count] if own else acceptance[offsets[i] : offsets[i + 1]]
    return joined, ends


@compiled
def draw_accepted(requests, generated, cumulative, seed):
    """int64 [n]: draft tokens of each request that are accepted, always the same at the same position; `cumulative`
    (float64 [k], falling) is the probability that so many are."""
    accepted = np.zeros(requests.size, np.int64)
    for i in range(requests.size):
        chance = (hashed(requests[i], generated[i], seed) >> np.uint64(11)) / 2.0**53
        while accepted[i] < cumulative.size and chance < cumulative[accepted[i]]:
            accepted[i] += 1
    return accepted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that describe a trained drafter."""
    parser.add_argument("--draft-acceptance", nargs="+", type=float, metavar="SHARE", help="of a trained drafter's "
        "tokens, by position, of those accepted up to there; the last one holds for all later ones")  # fmt: skip
    parser.add_argument("--pass-share", type=float, default=PASS_SHARE, help="of a step of the target without drafts "
        f"that a trained drafter's pass takes (default {PASS_SHARE:g}, of another model)")  # fmt: skip
    parser.add_argument("--decay", type=float, default=DECAY, help="share of a trained drafter's acceptance that is "
        f"lost with each training step (default {DECAY:g})")  # fmt: skip
    parser.add_argument("--staleness", type=int, default=0, help="training steps since the drafter was trained")


def from_options(options: argparse.Namespace, shares=None) -> TrainedDrafter | None:
    """The trained drafter that the options describe; `shares`: its acceptance where they name none.

    Raises:
        ValueError: a value outside its range.
    """
    shares = options.draft_acceptance or shares
    if not shares:
        return None
    return TrainedDrafter(tuple(shares), options.pass_share, options.decay, options.staleness)
