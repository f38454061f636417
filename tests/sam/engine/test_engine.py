"""One engine with sam: the switch in it, what is recorded and counted, and requests near the longest length."""

import numpy as np
import pytest

from sam.switch.policies import make_policy
from sam.switch.step_cost import StepCost
from sam.vllm.step_recorder import StepRecorder
from tests.sam.engine.tiny_engine import PROMPTS, Engine, assert_same

pytestmark = pytest.mark.engine

DRAFT_LENGTH, SOME = 3, 6


@pytest.fixture(scope="module")
def engine(model, off):
    """As many requests run as most tests ask, with goodput's table measured at warm-up."""
    with Engine(model, "sam", len(PROMPTS), speculation={"policy": "goodput"}) as engine:
        yield engine


@pytest.fixture
def use(engine):
    """Gives the engine another policy."""

    def put(name, threshold=0, **goodput):
        policy = make_policy(name, DRAFT_LENGTH, threshold, **goodput)
        policy.counters = engine.runner.drafter.counters
        engine.runner.drafter.policy = policy

    return put


def test_goodput_with_a_table_measured_at_warm_up(engine, off, use):
    table = engine.runner.drafter.policy.cost.step_cost
    assert (table.source, table.tokens_per_request.tolist()) == ("forward passes at warm-up", [1, 2, 3, 4])
    on = engine.generate()
    assert_same(on, off)
    assert (on.installed["drafter"], on.installed["verification"]) == ("SamProposer", "exact")
    # Whether that table lets it draft is up to the machine's load; where draft tokens cost nothing, it does.
    use("goodput", step_cost=StepCost(np.array([1, 8]), np.array([1, 4]), np.array([64]), np.full((2, 2, 1), 50.0)))
    drafting = engine.generate()
    assert_same(drafting, off)
    assert drafting.drafted > drafting.accepted > 0


def test_every_step_is_recorded_and_those_with_many_requests_draft_nothing(engine, off, use):
    recorder, proposer = StepRecorder.attach(engine.runner), engine.runner.drafter
    for policy in ("always", "threshold"):
        use(policy, SOME)
        recorder.take()
        on = engine.generate()
        assert_same(on, off)
        record, kept = recorder.take(), sum(map(len, on.tokens))
        assert record.replays() is None, "a CPU has no graphs"
        # Accepted drafts beyond a response's last token are sampled and then cut off by the scheduler.
        assert kept <= record.emitted.sum() <= kept + DRAFT_LENGTH * len(on.tokens)
        assert on.accepted <= record.accepted.sum() <= on.accepted + DRAFT_LENGTH * len(on.tokens)
        assert on.counters["tracked_requests"] == len(PROMPTS) and on.counters["draft_errors"] == 0
        if policy == "always":  # one that is near the longest length keeps nobody from drafting
            assert (record.drafted[3:-3] > 0).all() and on.accepted > 100
        else:
            assert on.counters["skipped_steps"] > 20 and not record.drafted[record.running > SOME + 1].any()
    # Finished requests are released by the next step: one more request releases them all and stays itself.
    engine.generate(PROMPTS[:1], [{"max_tokens": 2}])
    assert len(proposer.tracked.states) == 1


def test_new_weights_in_pieces_are_one_version(engine):
    before = engine.runner.drafter.counters["policy_version"]
    for _ in range(2):
        engine.runner.get_model().load_weights(iter(()))
    assert engine.runner.drafter.counters["policy_version"] == before + 1
