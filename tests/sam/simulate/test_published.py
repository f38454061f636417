"""The published set-ups: their shipped tables, and the command."""

import json

import pytest

from sam.simulate import published
from sam.simulate.setups import SETUPS, load_step_cost, shipped_acceptance, shipped_step_costs


def test_shipped_tables_say_what_they_are():
    assert {"qwen3_32b", "qwen3_32b_128die", "qwen3_235b"} <= set(shipped_step_costs())
    for name in SETUPS:
        cost, cautious = load_step_cost(name), load_step_cost(f"{name}_cautious")
        for table in (cost, cautious):
            assert table.source.startswith("FITTED TO PUBLISHED FIGURES, NOT MEASURED")
        assert 1000 < cost.fingerprint["mean_response_tokens"] < 20000
        # The same in the published tails' context, more in a shorter one, and the same in every one.
        assert cautious.step_ms(8, 32, 100) == pytest.approx(cost.step_ms(8, 32, 20480))
        assert cautious.step_ms(8, 32, 100) > cost.step_ms(8, 32, 100)
    # The published recipe's drafter accepts less than sam with all samples of a prompt.
    recipe, sam = (shipped_acceptance(drafter, 3) for drafter in ("first-occurrence", "sam"))
    assert recipe.mean_length(1, 5000) < sam.mean_length(1, 5000) < sam.mean_length(16, 5000)


def test_the_command_says_gains_as_published(capsys, monkeypatch):
    asked = []
    row = {"label": "goodput, k 3", "scope": "group", "routing": "shared", "seconds": 60.0, "mean_seconds": 50.0,
           "tail_speedup": 1.25, "accept_length": 1.5, "switched_on": 0.5}  # fmt: skip
    off = {**row, "label": "off", "seconds": 66.0}

    def simulate(name, options):
        asked.append((name, options))
        return [off, row]

    monkeypatch.setattr(published, "simulate", simulate)
    assert published.main(["--setup", "qwen3_32b", "--predict", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (reproduced,) = found["published"]
    assert (reproduced["published_gain_percent"], reproduced["gain_percent"]) == ([9.64, 10.02], 10.0)
    assert reproduced["seconds"] == [11, 10], "of one of six rounds"
    assert [one["cautious_gain_percent"] for one in found["predicted"]] == [10.0] * 3
    assert sum("qwen3_32b_cautious" in options for _, options in asked) == 3
    assert published.main(["--setup", "qwen3_32b", "--predict"]) == 0
    assert "goodput, k 3" in capsys.readouterr().out


def test_the_command_says_what_each_part_brings(capsys, monkeypatch):
    def simulate(name, options):
        seconds = [120.0, 100.0, 80.0]
        return [{"seconds": s / (1 + ("goodput" in options)), "last_tenth_seconds": s / 10} for s in seconds]

    monkeypatch.setattr(published, "simulate", simulate)
    rows = {row["part"]: row for row in published.parts("qwen3_32b")}
    assert rows["routing"]["gain_percent"] == 20.0 and rows["routing, chunks"]["gain_percent"] == 50.0
    assert rows["all"]["gain_percent"] == 200.0 and rows["all"]["tail_speedup"] == 1.5
    assert "all  200.00      1.50x" in published.table_of_parts(list(rows.values()))
