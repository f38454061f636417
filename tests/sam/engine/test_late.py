"""A session that waits for nothing: what it reads, how long its drafts are, what it tells the policy."""

from dataclasses import dataclass

import numpy as np

from sam.config import SpeculationConfig
from sam.drafting.drafter import Drafter
from sam.engine.late import LateSession
from sam.switch.policies import Plan
from tests.sam.engine.test_session import LONGEST, PROMPT, start, step


@dataclass
class Copy:
    """Of a step's tokens to the host."""

    has_ended: bool = False

    def query(self) -> bool:
        return self.has_ended

    def synchronize(self) -> None:
        assert self.has_ended, "waited"


def session_of(**speculation) -> LateSession:
    drafter = Drafter(max_draft_tokens=3, memory_budget_bytes=1 << 20)
    return LateSession(SpeculationConfig(**{"policy": "always"} | speculation), drafter, {}, LONGEST, True)


def begin(session, tokens, verified=None):
    """A step under way: what it drafts for the next one, and the step."""
    one = step(tokens, had_drafts=verified is not None)
    one.verified = None if verified is None else np.array(verified)
    one.copied = Copy()
    drafts = session.draft(one, is_known=False)
    session.stepped(one)
    return drafts, one


def test_it_reads_what_has_come_and_waits_for_nothing():
    session = session_of()
    start(session, "a")
    drafts, first = begin(session, {"a": [2]})
    assert drafts == {"a": [0, 0, 0]}, "of a request that the step before did not have"
    _, second = begin(session, {"a": [3, 4]}, verified=[3])
    assert session.drafter.num_tokens("a") == len(PROMPT)
    first.copied.has_ended = True
    start(session, "b")
    _, third = begin(session, {"a": [5], "b": [2]}, verified=[3, 0])
    assert session.drafter.lengths(["a", "b"]).tolist() == [len(PROMPT) + 1, len(PROMPT)]
    second.copied.has_ended = third.copied.has_ended = True
    session.ended({"a"})
    begin(session, {"b": [3]}, verified=[3])
    assert session.follows(["a", "b", "c"]).tolist() == [False, True, False]
    assert session.counters["draft_errors"] == session.counters["waited_steps"] == 0


def test_a_request_whose_drafts_are_rejected_gets_shorter_ones():
    session = session_of()
    session.switch.policy.plan = lambda state: Plan(3, min_acceptance=0.4)
    start(session, "good", "bad")
    for _ in range(30):
        drafts, one = begin(session, {"good": [1, 2, 3, 4], "bad": [9]}, verified=[3, 3])
        one.copied.has_ended = True
    assert len(drafts["good"]) == 3 and len(drafts.get("bad", [])) < 2


def test_the_policy_is_told_of_the_step_that_has_ended_and_of_none_where_two_have():
    session, told = session_of(), []
    session.switch.policy.observe = lambda state, drafted, accepted, ms: told.append((state.running, drafted, accepted))
    start(session, "a", "b")
    steps = [begin(session, {"a": [1]})[1]]
    steps += [begin(session, {"a": [1, 2], "b": [1]}, verified=[3, 2])[1] for _ in range(2)]
    assert not told
    for ended in (steps[:1], steps[1:2], [], steps[2:]):
        for one in ended:
            one.copied.has_ended = True
        steps.append(begin(session, {"a": [1]})[1])
    assert told == [(2, 5, 1), (2, 5, 1)], "the first has none before it; nothing ended in one of the calls"
    for one in steps:
        one.copied.has_ended = True
    begin(session, {"a": [1]})
    assert len(told) == 2
