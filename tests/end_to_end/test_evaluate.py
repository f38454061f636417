"""pass@1 with SAM on and off on a CPU: the same responses, and statistics that see a difference where there is one."""

import json

import numpy as np
import pytest

from recipe import evaluate
from recipe.report.paired_test import sign_flip_p_value


@pytest.mark.engine
@pytest.mark.e2e
def test_a_checkpoint_answers_alike_with_and_without_sam(assets, tmp_path, capfd):
    arguments = [
        *("--model", str(assets / "model"), "--data", str(assets / "val.parquet"), "--output", str(tmp_path)),
        *("--n", "4", "--max-tokens", "96", "--dtype", "float32", "--threshold", "64", "--device", "cpu"),
        *("--temperature", "1.0", "0"),
    ]
    assert evaluate.main(arguments) == 0
    sampled, greedy = json.loads((tmp_path / "result.json").read_text())
    assert sampled["problems"] == 4 and sampled["identical"] == sampled["responses"] == 16
    assert greedy["problems"] == greedy["identical"] == greedy["responses"] == 4
    for result in (sampled, greedy):
        assert result["sam"]["pass_at_1"] == result["off"]["pass_at_1"] and result["p_value"] == 1.0
    said = capfd.readouterr().out
    assert "temperature 1: 4 problems, 16 of 16 responses identical" in said and "| greedy, off | " in said
    before = (tmp_path / "sam.jsonl").stat().st_mtime_ns
    assert evaluate.main(arguments) == 0  # nothing is generated again
    assert (tmp_path / "sam.jsonl").stat().st_mtime_ns == before


@pytest.mark.parametrize(("gain", "significant"), [(0.0, False), (0.15, True)])
def test_the_paired_test_sees_a_difference(gain, significant):
    chance = np.random.default_rng(1)
    ability = chance.uniform(0.2, 0.7, (200, 1))
    off = (chance.random((200, 8)) < ability).astype(float)
    on = (chance.random((200, 8)) < ability + gain).astype(float)
    assert (sign_flip_p_value(on.mean(1) - off.mean(1)) < 0.01) == significant
    low, high = evaluate.interval(off)
    assert low < ability.mean() < high and 0.02 < high - low < 0.12


def test_a_missing_model_is_one_line(tmp_path, capsys):
    assert evaluate.main(["--model", str(tmp_path / "no"), "--data", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: --model {tmp_path / 'no'}: there is no such path\n"


def test_numbers_of_the_command_line_are_numbers(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(evaluate, "evaluate", lambda settings, output: seen.append(settings) or [])
    monkeypatch.setattr(evaluate, "as_table", lambda result: "")
    required = ["--model", str(tmp_path), "--data", str(tmp_path), "--device", "cpu"]
    assert evaluate.main([*required, "--threshold", "64", "--temperature", "0.5"]) == 0
    assert (seen[0].threshold, seen[0].temperature) == (64, (0.5,))
