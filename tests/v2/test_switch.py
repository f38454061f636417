"""The switch in the scheduler: how long next step's drafts are."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.v1.worker.gpu.spec_decode.speculator")

from sam.config import SpeculationConfig
from sam.switch.step_cost import linear
from sam.vllm.v2.scheduler import Switch

K = 3


@pytest.fixture
def clock(monkeypatch):
    seconds = SimpleNamespace(now=0.0)
    monkeypatch.setattr("time.perf_counter", lambda: seconds.now)
    return seconds


def switch_of(**speculation) -> Switch:
    vllm = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=K),
        model_config=SimpleNamespace(enforce_eager=True),
    )
    return Switch(SpeculationConfig(**speculation), vllm)


def step(switch, clock, requests: int, budget: int, right: int, milliseconds: float) -> int:
    """A step that verifies drafts of a length, of which so many tokens are right; returns the next step's length."""
    names = [str(row) for row in range(requests)]
    scheduled = SimpleNamespace(
        scheduled_spec_decode_tokens={name: [-1] * budget for name in names} if budget else {},
        num_scheduled_tokens=dict.fromkeys(names, 1 + budget),
        total_num_scheduled_tokens=requests * (1 + budget),
    )
    following = switch[requests]
    clock.now += milliseconds / 1e3
    tokens = [[0] * (1 + min(right, budget)) for _ in names]
    output = SimpleNamespace(sampled_token_ids=tokens, req_id_to_index={name: row for row, name in enumerate(names)})
    switch.observe(scheduled, output)
    return following


def lengths(switch, clock, right: int, per_token: float, steps: int = 300, requests: int = 4) -> list[int]:
    """Of all steps' drafts; a step takes 10 ms, and `per_token` ms for each draft token."""
    found = [0]
    for _ in range(steps):
        found.append(step(switch, clock, requests, found[-1], right, 10.0 + per_token * requests * found[-1]))
    assert switch.errors == 0
    return found[-100:]


def test_goodput_drafts_as_many_tokens_as_pay(clock):
    cheap = lengths(switch_of(policy="goodput"), clock, right=K, per_token=0.1)
    assert sum(length == K for length in cheap) > 90
    dear = lengths(switch_of(policy="goodput"), clock, right=1, per_token=3.0)
    assert sum(length > 0 for length in dear) < 20
    useless = lengths(switch_of(policy="goodput"), clock, right=0, per_token=1.0)
    assert sum(length > 0 for length in useless) < 20
    switch = switch_of(policy="goodput")
    switch.policy.use_table(linear(10.0, 0.0, 0.5))
    found = lengths(switch, clock, right=1, per_token=0.5)
    assert sum(length == 1 for length in found) > 80, "drafts end where acceptance does"


def test_a_fault_is_a_step_without_drafts_and_told_once(monkeypatch, caplog):
    switch = switch_of()
    monkeypatch.setattr(switch.policy, "plan", None)
    assert [switch[1], switch[1]] == [0, 0] and switch.errors == 2
    assert caplog.text.count("the switch failed") == 1
