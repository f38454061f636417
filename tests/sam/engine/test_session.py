"""A session without an engine: what it is told of requests and steps, and what it drafts."""

from types import SimpleNamespace

import numpy as np
import pytest

from sam.config import SpeculationConfig
from sam.drafting.drafter import Drafter
from sam.engine.requests import Step, Text
from sam.engine.session import Session

LONGEST = 40
PROMPT = [7, 8, 9, 1]


class Copy:
    """Of a step's tokens to the host."""

    waits = 0

    def synchronize(self) -> None:
        Copy.waits += 1


def session_of(policy="always", is_async=True, **speculation) -> Session:
    config = SpeculationConfig(policy=policy, **speculation)
    drafter = Drafter(max_draft_tokens=3, memory_budget_bytes=1 << 20)
    return Session(config, drafter, {}, LONGEST, is_async)


def start(session, *names, given=()) -> None:
    for name in names:
        session.started(name, Text(SimpleNamespace(extra_args=None), list(PROMPT), list(given)))


def step(tokens: dict[str, list[int]], had_drafts: bool = False) -> Step:
    rows = np.zeros((len(tokens), 1 + max(map(len, tokens.values()), default=0)), dtype=np.int64)
    for row, found in zip(rows, tokens.values(), strict=True):
        row[: len(found)] = found
    counts = np.array([len(found) for found in tokens.values()])
    return Step([*tokens], counts > 0, 8.0, had_drafts, rows, counts, Copy())


def after(session, tokens, is_known=True) -> dict[str, list[int]]:
    one = step(tokens)
    session.stepped(one)
    return session.draft(one, is_known)


def test_drafts_of_different_lengths_come_from_what_the_samples_of_a_prompt_have_written():
    session = session_of()
    start(session, "a", "b", "c")
    assert not after(session, {"a": [2, 3, 4, 5, 6], "b": []}).get("b")
    found = after(session, {"b": [2], "c": [2, 3, 4, 5]})
    assert found == {"b": [3, 4, 5], "c": [6]}
    assert session.counters["draft_errors"] == 0 and session.counters["tracked_requests"] == 3


def test_a_step_whose_tokens_may_not_be_waited_for_is_planned_and_drafts_nothing():
    session = session_of()
    start(session, "a", "b")
    before = Copy.waits
    assert after(session, {"a": [2, 3, 4, 5, 6], "b": [2]}, is_known=False) == {}
    assert Copy.waits == before and session.switch.wants_drafts and session.counters["late_steps"] == 1
    assert after(session, {"a": [7], "b": [3]})["b"] == [4, 5, 6]


def test_no_draft_is_longer_than_the_model_takes():
    session = session_of()
    start(session, "a")
    start(session, "b", given=[2] * (LONGEST - len(PROMPT) - 4))
    assert len(after(session, {"a": [2] * 9, "b": [2]})["b"]) == 2


def test_the_switch_reads_text_now_and_then_and_drafts_nothing():
    session = session_of("never")
    start(session, "a")
    before = Copy.waits
    for _ in range(31):
        assert after(session, {"a": [2]}, is_known=False) == {}
    assert Copy.waits == before
    after(session, {"a": [2]}, is_known=False)
    assert session.drafter.num_tokens("a") == len(PROMPT) + 29, "all but the steps whose copies may be under way"


def test_a_preempted_request_starts_again_and_goes_on():
    session = session_of()
    start(session, "a", "b")
    after(session, {"a": [2, 3, 4, 5, 6], "b": [2, 3]})
    start(session, "b", given=[2])  # the scheduler has not had its last token
    assert after(session, {"a": [9], "b": [3]})["b"] == [4, 5, 6]
    session.ended({"a", "b"})
    session.read()
    start(session, "c")
    assert after(session, {"c": [2]}) == {"c": [3, 4, 5]}, "what has ended is drafted from"


@pytest.mark.parametrize("fault", ["append", "draft"])
def test_a_fault_is_counted_and_costs_drafts(fault, monkeypatch, caplog):
    session = session_of()
    start(session, "a", "b")
    with monkeypatch.context() as patch:
        patch.setattr(session.drafter, fault, None)
        assert after(session, {"a": [2, 3, 4, 5, 6], "b": [2]}) == {}
        assert after(session, {"a": [2], "b": [3]}) == {}
    assert session.counters["draft_errors"] >= 1 and caplog.text.count("drafting failed") == 1
    start(session, "c", "d")
    after(session, {"c": [2, 3, 4, 5, 6], "d": []})
    assert after(session, {"c": [7], "d": [2]})["d"] == [3, 4, 5]


def test_tokens_that_are_padded_say_how_many_they_are():
    session = session_of()
    start(session, "a", "b")
    emits = np.array([True, False])
    one = Step(["a", "b"], emits, 8.0, True, np.array([[2, 3, -1], [4, 5, 6]]), None, Copy())
    session.stepped(one)
    session.draft(one, is_known=True)
    assert one.counts.tolist() == [2, 0]
    assert session.texts["a"].array().tolist() == [*PROMPT, 2, 3] and session.texts["b"].array().tolist() == PROMPT


def test_scheduled_synchronously_no_step_is_waited_for_or_late():
    session = session_of(is_async=False)
    start(session, "a")
    one = step({"a": [2]})
    one.copied = None
    session.stepped(one)
    session.draft(one, is_known=True)
    assert not {"late_steps", "waited_steps"} & session.counters.keys()
    assert session.drafter.num_tokens("a") == len(PROMPT) + 1
