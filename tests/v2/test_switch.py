"""The switch in the scheduler: how long next step's drafts are."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.v1.worker.gpu.spec_decode.speculator")

from sam.config import SpeculationConfig
from sam.switch.step_cost import linear
from sam.vllm.v2.scheduler import Switch

K, REQUESTS = 3, [str(row) for row in range(4)]


def switch_of(**speculation) -> Switch:
    vllm = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=K),
        model_config=SimpleNamespace(enforce_eager=True),
    )
    return Switch(SpeculationConfig(**speculation), vllm)


def lengths(switch, monkeypatch, right: int, per_token: float) -> list[int]:
    """Of the last of 300 steps' drafts, of each of which `right` tokens are accepted at most; a step takes 10 ms, and
    `per_token` ms for each draft token."""
    found, milliseconds = [0], 0.0
    monkeypatch.setattr("time.perf_counter", lambda: milliseconds / 1e3)
    for _ in range(300):
        budget = found[-1]
        scheduled = SimpleNamespace(
            scheduled_spec_decode_tokens=dict.fromkeys(REQUESTS, [-1] * budget) if budget else {},
            num_scheduled_tokens=dict.fromkeys(REQUESTS, 1 + budget),
            total_num_scheduled_tokens=len(REQUESTS) * (1 + budget),
        )
        found.append(switch[len(REQUESTS)])
        milliseconds += 10.0 + per_token * len(REQUESTS) * budget
        tokens = [[0] * (1 + min(right, budget)) for _ in REQUESTS]
        rows = {name: row for row, name in enumerate(REQUESTS)}
        switch.observe(scheduled, SimpleNamespace(sampled_token_ids=tokens, req_id_to_index=rows))
    assert switch.errors == 0
    return found[-100:]


def test_goodput_drafts_as_many_tokens_as_pay(monkeypatch):
    cheap = lengths(switch_of(policy="goodput"), monkeypatch, right=K, per_token=0.1)
    assert sum(length == K for length in cheap) > 90
    dear = lengths(switch_of(policy="goodput"), monkeypatch, right=1, per_token=3.0)
    assert sum(length > 0 for length in dear) < 20
    switch = switch_of(policy="goodput")
    switch.policy.use_table(linear(10.0, 0.0, 0.5))
    found = lengths(switch, monkeypatch, right=1, per_token=0.5)
    assert sum(length == 1 for length in found) > 80, "drafts end where acceptance does"


def test_a_fault_is_a_step_without_drafts_and_told_once(monkeypatch, caplog):
    switch = switch_of()
    monkeypatch.setattr(switch.policy, "plan", None)
    assert [switch[1], switch[1]] == [0, 0] and switch.errors == 2
    assert caplog.text.count("the switch failed") == 1
