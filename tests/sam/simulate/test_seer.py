"""Seer's set-ups: acceptance as published, costs and caches as assumed, and the table."""

import json
from dataclasses import replace

import numpy as np
import pytest

from sam.simulate import published
from sam.simulate.reference import seer
from sam.simulate.reference.seer import (
    ACCEPT_LENGTHS,
    KNOWN,
    PARTS,
    SCALE,
    TASKS,
    Fit,
    acceptance,
    cluster,
    play,
    step_cost,
)


def test_acceptance_is_as_published():
    table = acceptance()
    found = [table.mean_length(known + 1, 1000) for known in KNOWN]
    assert found == pytest.approx(ACCEPT_LENGTHS, abs=0.01)
    assert table.acceptance.sum(axis=1).reshape(len(KNOWN), -1)[:, 0] + 1 == pytest.approx(found, abs=0.01)


def test_a_step_reads_weights_and_cache_and_the_experts_that_it_needs():
    fit, dense, sparse = Fit(), TASKS["Qwen2-VL-72B"], TASKS["Kimi-K2"]
    cost = step_cost(dense, fit)
    read_ms = 1e3 * dense.weights / (8 * 3.35e12 / 2)
    assert cost.step_ms(1, np.array([1]), 1)[0] == pytest.approx(5.0 + read_ms, rel=0.01)
    # Of Kimi-K2's experts one token needs 8 of 384, and many tokens nearly all; each GPU reads its own other weights.
    one, many = (step_cost(sparse, fit).step_ms(n, np.array([n]), 1)[0] for n in (1, 256))
    others_ms = 1e3 * sparse.each / (3.35e12 / 2)
    assert one - others_ms < 6.5 < 20.0 < many - others_ms
    for task, held in ((dense, dense.weights), (sparse, sparse.weights + 31 * sparse.each)):
        machines = cluster(task)
        free = 0.9 * 80e9 * task.gpus_an_instance - held
        assert machines.replicas * task.gpus_an_instance == task.gpus and machines.pool
        assert machines.kv_tokens == int(free / task.kv_bytes / SCALE)


def test_every_part_plays_the_same_responses():
    small = replace(TASKS["Qwen2-VL-72B"], gpus=8, prompts=6, samples=4)
    outcomes = play(small, Fit(sigma=0.8, correlation=0.8))
    assert list(outcomes) == ["verl", *PARTS]
    assert len({outcome.tokens for outcome in outcomes.values()}) == 1
    assert outcomes["divided"].preempted == outcomes["+ context"].preempted == 0
    assert outcomes["+ drafts"].seconds < outcomes["+ context"].seconds
    assert 1.0 < outcomes["+ drafts"].accept_length < ACCEPT_LENGTHS[-1]


def test_the_command_prints_what_is_missed(capsys, monkeypatch):
    rows = [
        {"task": "Moonlight", "part": "divided", "published": 1.41, "simulated": simulated, "percent": percent,
         "tail": 0.5, "published_tail": tail, "accept_length": 1.0, "preempted_by_verl": 3}
        for simulated, percent, tail in ((1.5, 6.4, None), (1.8, 27.7, 0.15))
    ]  # fmt: skip
    monkeypatch.setattr(published, "compare_with_seer", lambda: rows)
    assert published.main(["--seer"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("Seer, speed over verl's, 3 rounds; FITTED to all rows: sigma")
    assert [line.endswith("not within 15 %") for line in lines[2:]] == [False, True]
    assert published.main(["--seer", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seer"] == rows


def test_rows_are_ratios_over_verls(monkeypatch):
    def fake(task, fit):
        outcome = play(replace(task, gpus=task.gpus_an_instance, prompts=2, samples=2), fit, parts=("verl",))["verl"]
        times = {"verl": 1.0, **dict.fromkeys(PARTS, 0.5)}
        seconds, tail = outcome.seconds, outcome.last_tenth_seconds
        return {
            part: replace(outcome, seconds=seconds * share, last_tenth_seconds=tail * share)
            for part, share in times.items()
        }

    monkeypatch.setattr(seer, "play", fake)
    rows = seer.compare()
    assert [(row["task"], row["part"]) for row in rows] == [(task, part) for task in TASKS for part in PARTS]
    assert {row["simulated"] for row in rows} == {2.0} and {row["tail"] for row in rows} == {0.5}
    assert rows[0]["percent"] == round(100 * (2.0 / 1.41 - 1), 1)
