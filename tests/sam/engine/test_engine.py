"""Engines with sam, scheduled synchronously and asynchronously: the switch, what is recorded and kept, faults, and
requests near the longest length."""

import itertools

import numpy as np
import pytest

from sam.engine.requests import RequestHints
from sam.switch.policies import Plan, Switch, make_policy
from sam.switch.step_cost import StepCost
from sam.vllm.plugin import installed
from sam.vllm.step_recorder import StepRecorder
from tests.sam.engine.faults import FAULTS, mend
from tests.sam.engine.tiny_engine import PROMPTS, VOCABULARY, Engine, assert_same
from tests.sam.history.kept import kept

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("asynchronous")]

DRAFT_LENGTH, SOME = 3, 6
TURN = 5  # steps after which drafting is turned on or off
ENGINES = {"synchronous": (False, "SamProposer"), "asynchronous": (True, "AsyncSamProposer")}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, model, off):
    """As many requests run as most tests ask, with goodput's table measured at warm-up."""
    is_asynchronous, drafter = ENGINES[request.param]
    with Engine(model, "sam", len(PROMPTS), is_asynchronous, speculation={"policy": "goodput"}) as engine:
        wanted = {"drafter": drafter, "verification": "exact", "asynchronous": is_asynchronous}
        assert installed(engine.runner) == wanted
        yield engine


@pytest.fixture
def use(engine):
    """Gives the engine another policy."""

    def put(name, threshold=0, **goodput):
        policy, proposer = make_policy(name, DRAFT_LENGTH, threshold, **goodput), engine.runner.drafter
        proposer.session.switch = Switch(policy, proposer.counters)
        return policy

    return put


def test_goodput_with_a_table_measured_at_warm_up(engine, off, use):
    table = engine.runner.drafter.policy.cost.step_cost
    assert (table.source, table.tokens_per_request.tolist()) == ("forward passes at warm-up", [1, 2, 3, 4])
    assert table.requests.tolist() == [1, 2, 4, 8, 12] and (np.diff(table.milliseconds, axis=1) >= 0).all()
    assert_same(engine.generate(), off)
    # Whether that table lets it draft is up to the machine's load; where draft tokens cost nothing, it does.
    use("goodput", step_cost=StepCost(np.array([1, 8]), np.array([1, 4]), np.array([64]), np.full((2, 2, 1), 50.0)))
    drafting = engine.generate()
    assert_same(drafting, off)
    assert drafting.drafted > drafting.accepted > 0


@pytest.mark.parametrize("name", ["always", "threshold"])
def test_every_step_is_recorded_and_those_with_many_requests_draft_nothing(engine, off, use, name, monkeypatch):
    """What was verified, not the scheduler's placeholders; and a policy learns from steps that it planned."""
    recorder, policy, learnt = StepRecorder.attach(engine.runner), use(name, SOME), []
    monkeypatch.setattr(policy, "observe", lambda state, *seen: learnt.append((state.running, *seen[:2])))
    recorder.take()
    on = engine.generate()
    assert_same(on, off)
    _running, so_far, _verified, _emitted = recorder.progress()
    record, tokens = recorder.take(), sum(map(len, on.tokens))
    assert so_far in (record.emitted.sum(), record.emitted[:-1].sum()), "scheduled asynchronously the last is not read"
    assert record.replays() is None, "a CPU has no graphs"
    # Accepted drafts beyond a response's last token are sampled and then cut off by the scheduler.
    assert tokens <= record.emitted.sum() <= tokens + (DRAFT_LENGTH + 1) * len(PROMPTS)
    assert on.accepted <= record.accepted.sum() <= on.accepted + DRAFT_LENGTH * len(PROMPTS)
    assert record.accepted.sum() == record.accepted_at.sum() < record.drafted.sum()
    assert record.drafted.sum() <= on.drafted + DRAFT_LENGTH * len(PROMPTS)
    assert on.counters["tracked_requests"] == len(PROMPTS) and on.counters["draft_errors"] == 0
    if name == "always":  # one that is near the longest length keeps nobody from drafting
        # Of few requests none may find what it wrote before.
        assert (record.drafted[3:-3] > 0).mean() > 0.9 and on.accepted > 100 and len(learnt) > 10
    else:
        assert on.counters["skipped_steps"] > 20 and not record.drafted[record.running > SOME + 1].any()
    rows = iter(zip(record.running, record.drafted, record.accepted, strict=True))
    assert learnt and all(one in rows for one in learnt)


def test_turning_costs_no_step_and_scheduled_asynchronously_one(engine, off, use, monkeypatch):
    """From the first step that asks for drafts to the first that verifies some: drafts of the step that asks first
    would come late there, and are left out."""
    recorder, steps = StepRecorder.attach(engine.runner), itertools.count()
    monkeypatch.setattr(use("always"), "plan", lambda state: Plan(3 * (next(steps) // TURN % 2)))
    recorder.take()
    on = engine.generate()
    assert_same(on, off)
    drafts = "".join("d" if drafted else " " for drafted in recorder.take().drafted).split()
    assert {len(some) for some in drafts[:2]} == {TURN - bool(engine.runner.use_async_scheduling)}
    assert on.counters["draft_errors"] == 0


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_costs_drafts_and_changes_no_token(engine, off, use, fault, monkeypatch):
    said, proposer = [], engine.runner.drafter
    monkeypatch.setattr("sam.engine.session.logger.exception", lambda text, *_: said.append(text))
    use("always")
    proposer.counters["draft_errors"] = 0  # so that it is said here
    FAULTS[fault](proposer)
    on = engine.generate()
    mend(proposer)
    assert_same(on, off)
    assert on.counters["draft_errors"] > 20
    assert len(said) == 1 and "drafting failed" in said[0]


def test_a_request_that_cannot_be_followed_gets_no_drafts_and_the_others_do(engine, off, use, monkeypatch):
    start = engine.runner.drafter.drafter.start

    def start_short(request_id, prompt, *others):
        if len(prompt) == len(PROMPTS[0]):
            raise ValueError("too long")
        start(request_id, prompt, *others)

    monkeypatch.setattr(engine.runner.drafter.drafter, "start", start_short)
    use("always")
    on = engine.generate()
    assert_same(on, off)
    assert (on.counters["untracked_requests"], on.counters["draft_errors"]) == (1, 0) and on.accepted > 50


ENDS = {"max_tokens": 9, "stop_token_ids": list(range(VOCABULARY))}  # by its first token
# Settings of a part, tokens that its response may have, and whether the part is aborted and whether it is kept.
PARTS = [
    ({"max_tokens": 3}, 5, False, False),  # its response goes on: the next part begins with these tokens
    ({"max_tokens": 3}, 4, False, True),
    (ENDS, 20, False, True),
    ({"max_tokens": 99}, 200, True, True),
    ({"max_tokens": 99}, None, True, False),  # interrupted: the client of verl's asynchronous trainers goes on with it
    (ENDS, None, False, True),
]


def test_of_a_response_in_parts_the_whole_is_kept_once_at_the_weight_sync(model, tmp_path):
    """Each part is one that follows another, which had the token 3."""
    from vllm import SamplingParams

    lasting, tokens = {"policy": "always", "scope": "history", "history_path": str(tmp_path)}, {}
    with Engine(model, "sam", speculation=lasting) as engine:
        core, history = engine.llm.llm_engine, engine.runner.drafter.session.history
        for row, (settings, limit, *_) in enumerate(PARTS):
            told = RequestHints(prompt_tokens=2, response_limit=limit).extra_args()
            asked = SamplingParams(seed=row, detokenize=False, extra_args=told, **settings)
            core.add_request(str(row), {"prompt_token_ids": [row, 2, 3]}, asked)
        while core.has_unfinished_requests():
            tokens |= {int(output.request_id): output.outputs[0].token_ids for output in core.step()}
            if len(tokens[3]) > 4:
                core.abort_request([str(row) for row, (*_, is_aborted, _) in enumerate(PARTS) if is_aborted])
        core.step()  # servers go on until the model runner has forgotten what has ended
        for _ in range(2):  # in pieces
            engine.runner.get_model().load_weights(iter(()))
        assert engine.counters()["policy_version"] == 1
        history.stop()
    for row, (*_, is_kept) in enumerate(PARTS):
        # Drafts behind the end were verified too, and stay in the text.
        found = [text[: 1 + len(tokens[row])] for text in kept(tmp_path, [row, 2])]
        assert found == ([[3, *tokens[row]]] if is_kept else []), row
