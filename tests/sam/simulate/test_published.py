"""The published set-ups: their shipped step costs, how these are fitted, and the commands."""

import json

import pytest

from sam.simulate.cost import shipped_step_costs
from sam.simulate.published import SETUPS, fitted_cost, loaded, main, shipped_acceptance
from sam.simulate.published_fit import main as fit
from sam.simulate.published_fit import solve


def test_shipped_tables_say_what_they_are():
    assert {"qwen3_32b", "qwen3_32b_128die", "qwen3_235b"} <= set(shipped_step_costs())
    for name in SETUPS:
        _, cost, mean, _ = loaded(name)
        assert cost.source == "FITTED TO PUBLISHED FIGURES, NOT MEASURED"
        assert 1000 < mean < 20000
    # The published recipe's drafter accepts less than sam with all samples of a prompt.
    published, sam = (shipped_acceptance(drafter, 3) for drafter in ("first-occurrence", "sam"))
    assert published.mean_length(1, 5000) < sam.mean_length(1, 5000) < sam.mean_length(16, 5000)


def test_fitted_costs():
    cost = fitted_cost(90.0, 0.25, 0.5)
    assert cost.step_ms(8, 8, 5000) == pytest.approx([90.0])
    assert cost.step_ms(8, 32, 2048) == pytest.approx([90.0 + 5.0 + 24 * (0.5 + 0.25 * 2)])


def test_a_falling_function_is_solved():
    assert solve(lambda x: 100.0 / x, 1.0, 50.0, 8.0, steps=20) == pytest.approx(12.5, rel=0.01)
    with pytest.raises(ValueError, match="no value from 1 to 2 meets 8"):
        solve(lambda x: 100.0 / x, 1.0, 2.0, 8.0)


def test_commands(capsys, monkeypatch, tmp_path):
    row = {**json.loads(json.dumps(dict.fromkeys(("setup",), "x"))), "gain_percent": 1.0}
    monkeypatch.setattr("sam.simulate.published.reproduce", lambda name: {**row, "setup": name})
    assert main(["--setup", "qwen3_32b", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["published"][0]["setup"] == "qwen3_32b"
    assert fit(["--output", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'none'}: no such folder\n"
