"""Every policy over a timeline that was recorded in verl: what each decides in each of its engine steps."""

import json
from pathlib import Path

import numpy as np
import pytest

from sam.switch.policies import make_policy
from sam.switch.policy import StepState
from sam.switch.step_cost import linear

RECORDED = json.loads(Path(__file__).with_name("recorded_timeline.json").read_text())
RUNNING, STEP_MS = np.array(RECORDED["running"]), np.array(RECORDED["step_ms"])
ACCEPTANCE = np.array(RECORDED["acceptance"], np.float32)
K = len(ACCEPTANCE)
COST = linear(2.3, 0.023, 0.022)  # about what that machine's steps took


def replay(name: str, threshold: int = 0) -> np.ndarray:
    """int64 [steps]: draft tokens verified in each step, which takes longer for them as COST says."""
    policy = make_policy(name, K, threshold, step_cost=COST)
    decisions = np.zeros(len(RUNNING), np.int64)
    for step, (running, milliseconds) in enumerate(zip(RUNNING.tolist(), STEP_MS.tolist(), strict=True)):
        state = StepState(running)
        if policy.plan(state).budget:
            acceptance, offsets = np.tile(ACCEPTANCE, running), np.arange(running + 1) * K
            decisions[step] = policy.choose(state, acceptance, offsets).sum()
        plain, longer = COST.step_ms(running, np.array([running, running + decisions[step]]), 1)
        accepted = round(float(decisions[step]) * float(ACCEPTANCE.mean()))
        policy.observe(state, int(decisions[step]), accepted, milliseconds * longer / plain)
    return decisions


@pytest.mark.parametrize("threshold", [4, 8, 16, 32, 64])
def test_thresholds_draft_for_all_or_for_nobody(threshold):
    decisions = replay("threshold", threshold)
    assert decisions.tolist() == np.where(RUNNING <= threshold, K * RUNNING, 0).tolist()
    assert 0 < (decisions > 0).sum() < len(RUNNING)


def test_always_and_never():
    assert replay("always").tolist() == (K * RUNNING).tolist()
    assert not replay("never").any()


def test_goodput_decides_as_it_did():
    """`goodput` of the recording: its decisions when the test was written, so that a change of them is seen."""
    decisions = replay("goodput")
    assert decisions.tolist() == RECORDED["goodput"]
    longest, full = decisions[RUNNING <= 2] / RUNNING[RUNNING <= 2], decisions[RUNNING == RUNNING.max()] / RUNNING.max()
    assert np.median(longest) == K and full.max() < K, "whole drafts where few run, shorter ones where many do"
    assert 0 < (longest == 0).mean() < 0.1, "now and then a step without, which tells what drafts cost"
