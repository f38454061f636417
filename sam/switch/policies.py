"""Policies: when an engine step speculates, and how many draft tokens it verifies.

Verifying k + 1 tokens costs as much as one token only while decoding is bound by memory bandwidth, that is while few
requests run. In each step a policy is called before drafting (`plan`: how many tokens a request may draft), after it
(`choose`: how many tokens of each draft are verified) and when the step is over (`observe`: how long it took). Draft
tokens that are not verified cost no accelerator time. A decision depends on the arguments of these calls alone.
"""

from sam.config import POLICIES
from sam.switch.goodput import Goodput
from sam.switch.policy import Plan, Policy, StepState

NO_THRESHOLD = 1 << 30


class Threshold(Policy):
    """Speculate while at most `batch_size_threshold` requests run, as the published recipe does, or are about to.

    Attributes:
        counters: awaited_steps, in which only requests that were about to come kept it off.
    """

    def __init__(self, num_speculative_tokens: int, batch_size_threshold: int):
        super().__init__()
        self.num_speculative_tokens, self.batch_size_threshold = num_speculative_tokens, batch_size_threshold

    def plan(self, state: StepState) -> Plan:
        """Compare the requests that run, and those that are about to, with the threshold."""
        if state.running > self.batch_size_threshold:
            return Plan(0, valid_for_steps=NO_THRESHOLD)
        if state.running + state.awaited > self.batch_size_threshold:
            self.count("awaited_steps")
            return Plan(0)
        return Plan(self.num_speculative_tokens)


def make_policy(name: str, num_speculative_tokens: int, batch_size_threshold: int, **goodput) -> Policy:
    """Build a policy by its name, one of POLICIES.

    Args:
        num_speculative_tokens: draft tokens of a request, at least 1.
        batch_size_threshold: running requests, used by threshold.
        goodput: arguments of Goodput, which the others have no use for.

    Raises:
        ValueError: unknown name, fewer than one draft token, or a negative threshold.
    """
    if num_speculative_tokens < 1:
        raise ValueError(f"num_speculative_tokens={num_speculative_tokens}: expected at least 1")
    if batch_size_threshold < 0:
        raise ValueError(f"batch_size_threshold={batch_size_threshold}: expected 0 or more")
    if name == "goodput":
        return Goodput(num_speculative_tokens, **goodput)
    thresholds = {"threshold": batch_size_threshold, "always": NO_THRESHOLD, "never": -1}
    if name not in thresholds:
        raise ValueError(f"speculation policy {name!r} is unknown: expected one of {', '.join(POLICIES)}")
    return Threshold(num_speculative_tokens, thresholds[name])
