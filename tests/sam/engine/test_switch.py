"""The switch in a real engine: goodput's table measured at warm-up, and the same tokens."""

import numpy as np
import pytest

from sam.switch.step_cost import StepCost
from tests.sam.engine.tiny_engine import SAM, generate, save_model

pytestmark = pytest.mark.engine

PROMPTS = [[5, 6, 7, 8, 5, 6, 7], [9, 10, 11]] * 4


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("goodput") / "model")


def test_the_same_tokens_with_a_table_measured_at_warm_up(model, tmp_path):
    policies = []
    settings = [{"max_tokens": 80, "seed": seed} for seed in range(len(PROMPTS))]
    off = generate(model, PROMPTS, settings)
    on = generate(
        model, PROMPTS, settings, SAM, policy="goodput", observe=lambda runner: policies.append(runner.drafter.policy)
    )
    assert on.tokens == off.tokens and on.logprobs == off.logprobs
    (policy,) = policies
    assert policy.has_table and policy.cost.step_cost.source == "forward passes at warm-up"
    assert policy.cost.step_cost.tokens_per_request.tolist() == [1, 2, 3, 4]
    # What the forward passes lack was learnt: scheduling and sampling take time in every step.
    assert policy.cost.correction.extra_ms(len(PROMPTS), 0) > 0
    # Whether that table lets it draft is up to the machine's load; where draft tokens cost nothing, it does.
    free = StepCost(np.array([1, 8]), np.array([1, 4]), np.array([64]), np.full((2, 2, 1), 50.0))
    free.save(tmp_path / "free.json")
    drafting = generate(model, PROMPTS, settings, SAM, policy="goodput", step_cost=str(tmp_path / "free.json"))
    assert drafting.tokens == off.tokens and drafting.logprobs == off.logprobs
    assert drafting.drafted > drafting.accepted > 0
