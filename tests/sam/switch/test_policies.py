"""When drafting is on, by every policy, while requests end one by one and over a recorded timeline."""

import json
from pathlib import Path

import numpy as np
import pytest

from sam.switch.policies import make_policy
from sam.switch.policy import StepState
from sam.switch.step_cost import linear

# A timeline that was recorded in verl: running requests and milliseconds of each engine step.
RECORDED = json.loads(Path(__file__).with_name("recorded_timeline.json").read_text())
RUNNING, STEP_MS = np.array(RECORDED["running"]), np.array(RECORDED["step_ms"])
ACCEPTANCE = np.array(RECORDED["acceptance"], np.float32)
K = len(ACCEPTANCE)
COST = linear(2.3, 0.023, 0.022)  # about what that machine's steps took


def play(name, running, acceptance, step_ms, cost, threshold=8):
    """int64 [steps]: draft tokens verified in each step of so many running requests, which takes `step_ms` of the step
    and its draft tokens."""
    k = len(acceptance)
    policy, decisions = make_policy(name, k, threshold, step_cost=cost), np.zeros(len(running), np.int64)
    for step, requests in enumerate(running):
        state = StepState(int(requests))
        if policy.plan(state).budget:
            drafts = np.tile(acceptance, requests), np.arange(requests + 1) * k
            decisions[step] = policy.choose(state, *drafts).sum()
        accepted = round(float(decisions[step]) * float(acceptance.mean()))
        policy.observe(state, int(decisions[step]), accepted, step_ms(step, int(decisions[step])))
    return decisions


TIMELINE = np.array([*range(96, 0, -1), *[1] * 30])


@pytest.mark.parametrize(
    "name, switched_on", [("threshold", 8 + 30), ("always", len(TIMELINE)), ("never", 0), ("goodput", 59 + 30)]
)
def test_requests_that_end_one_by_one_through_every_policy(name, switched_on):
    """96 requests end one by one; each first draft token is accepted with probability 0.5, a second with 0.25.

    A request costs nothing beyond its token and 63 tokens double a step, so a draft token pays while
    0.5 > running / (running + 63): below 63 requests, and brings the hundredth that it must bring below 60.
    """
    halves, cost = np.array([0.5, 0.25], np.float32), linear(63.0, 0.0, 1.0)
    decisions = play(name, TIMELINE, halves, lambda step, drafted: 63.0 + TIMELINE[step] + drafted, cost)
    assert (decisions > 0).sum() == pytest.approx(switched_on, abs=2 if name == "goodput" else 0)
    if name == "threshold":
        assert decisions.tolist() == np.where(TIMELINE <= 8, 2 * TIMELINE, 0).tolist()
    if name == "goodput":
        assert decisions[0] == 0 and decisions[-1] == 2
        between = (TIMELINE > 30) & (TIMELINE < 55)
        assert (decisions == TIMELINE)[between].all(), "one token each there"


def test_goodput_decides_as_it_did():
    """`goodput` of the recording: its decisions when the test was written, so that a change of them is seen."""

    def step_ms(step, drafted):
        plain, longer = COST.step_ms(RUNNING[step], np.array([RUNNING[step], RUNNING[step] + drafted]), 1)
        return STEP_MS[step] * longer / plain

    decisions = play("goodput", RUNNING, ACCEPTANCE, step_ms, COST)
    assert decisions.tolist() == RECORDED["goodput"]
    longest, full = decisions[RUNNING <= 2] / RUNNING[RUNNING <= 2], decisions[RUNNING == RUNNING.max()] / RUNNING.max()
    assert np.median(longest) == K and full.max() < K, "whole drafts where few run, shorter ones where many do"
    assert 0 < (longest == 0).mean() < 0.1, "now and then a step without, which tells what drafts cost"
