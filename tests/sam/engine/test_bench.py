"""`python -m sam.bench` on real engines, each in a process of its own: stock vLLM, off, sam and a draft model."""

import functools
import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from sam.bench import __main__ as command
from sam.bench import rounds
from sam.bench.__main__ import main
from sam.bench.engine_process import EngineProcess
from sam.bench.followed import tokens_of
from sam.vllm.bench.engine import digest
from tests.sam.engine.tiny_engine import VOCABULARY, save_model

pytestmark = pytest.mark.engine

ENGINE = ["--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "16"]
ENGINE += ["--kv-cache-memory-bytes", str(256 << 20)]  # other tests run beside these


@pytest.fixture
def inputs(tmp_path):
    save_model(tmp_path / "model", sharpness=12.0)
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, VOCABULARY, 8).tolist() for _ in range(9)]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt_token_ids": prompt}) + "\n" for prompt in prompts))
    return ["--model", str(tmp_path / "model"), "--prompts", str(path), "--output", str(tmp_path / "out")]


def test_stock_off_and_sam(inputs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(rounds, "REST_SECONDS", 0.0)  # these engines have no worker process
    load = ["--requests", "2", "8", "--samples", "4", "--max-tokens", "160", "--temperature", "0.3", "--ignore-eos"]
    assert main([*inputs, *load, *ENGINE, "--rounds", "1"]) == 0
    assert "at 8 requests" in capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    rows = {(row["variant"], row["requests"]): row for row in result["rows"]}
    assert result["warnings"] == []
    for requests in (2, 8):
        stock, off, sam = (rows[variant, requests] for variant in ("stock", "off", "sam"))
        assert sam["identical"] == sam["responses"] == 8  # four batches of 2
        assert stock["drafted"] is None and off["drafted"] == 0
        assert stock["steps"] == off["steps"] == 160 * 8 // requests
        assert min(row["seconds"] for row in (stock, off, sam)) > 0 and stock["memory_mib"] > 100
    assert rows["sam", 8]["accepted"] > 0 and rows["sam", 8]["acceptance_length"] > 1
    assert rows["sam", 8]["steps"] < 160
    check_records(tmp_path / "out", rows["sam", 8])


def test_a_draft_model_alone_and_beside_sam(inputs, tmp_path, capsys, monkeypatch):
    """The target drafts for itself, so that its drafts are accepted whatever it says."""
    monkeypatch.setattr(rounds, "REST_SECONDS", 0.0)
    load = ["--requests", "4", "--samples", "2", "--max-tokens", "60", "--temperature", "0", "--ignore-eos"]
    methods = ["draft_model", "hybrid"]
    drafts = ["--variants", "off", *methods, "--draft-model", str(tmp_path / "model"), "--draft-tokens", "3"]
    assert main([*inputs, *load, *drafts, *ENGINE, "--rounds", "1"]) == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    rows = {row["variant"]: row for row in result["rows"]}
    assert result["warnings"] == []
    for method in methods:
        assert rows[method]["identical"] == rows[method]["responses"] == 8
        assert not rows[method]["asynchronous"] and rows[method]["draft_errors"] == 0
        recorded = json.loads((tmp_path / "out" / "recorded" / f"4-{method}.json").read_text())
        assert len(recorded) == 2  # batches
        assert sum(sum(batch["columns"]["accepted"]) for batch in recorded) == rows[method]["accepted"] > 0


def check_records(output, row):
    """What is kept of the only batch of 8, step by step, adds up to what was counted, and to the first response."""
    (recorded,) = json.loads((output / "recorded" / "8-sam.json").read_text())
    assert len(recorded["ends"]) == row["steps"] and recorded["unfinished"][-1] == 0
    for name in ("drafted", "accepted"):
        assert sum(recorded["columns"][name]) == row[name]
    last = json.loads((output / "rounds.jsonl").read_text().splitlines()[-1])
    tokens = tokens_of(recorded["followed"], 160)
    assert digest([token.id for token in tokens]) == last["runs"]["sam"]["responses"][0]
    assert any(token.accepted for token in tokens)
    page = (output / "bench.html").read_text()
    assert "What speculation does: a response at 8 requests" in page and "class='accepted'" in page


def test_forced_text_on_a_config_alone_and_a_slowed_sam(inputs, tmp_path, capsys, monkeypatch):
    """Random weights, no tokenizer, and a drafter that sleeps: real text is emitted, and sam does not pay."""
    monkeypatch.setattr(rounds, "REST_SECONDS", 0.0)
    slowed = (sys.executable, str(Path(__file__).with_name("slowed_engine.py")))
    monkeypatch.setattr(command, "EngineProcess", functools.partial(EngineProcess, program=slowed))
    (folder := tmp_path / "config alone").mkdir()
    shutil.copy(tmp_path / "model" / "config.json", folder)
    generator = np.random.default_rng(0)
    groups = [(row, generator.integers(0, VOCABULARY, 12).tolist()) for row in range(12)]
    rows = [([1, 2, row], (phrase * 5)[: 20 + 10 * sample]) for row, phrase in groups for sample in range(4)]
    text = tmp_path / "recording.jsonl"
    text.write_text("".join(json.dumps({"prompt_tokens": p, "response_tokens": r}) + "\n" for p, r in rows))
    load = ["--text", str(text), "--requests", "4", "--samples", "4", "--load-format", "dummy"]
    output = ["--output", str(tmp_path / "out")]
    assert main(["--model", str(folder), *output, *load, *ENGINE[1:], "--rounds", "3"]) == 0
    assert "no-go: 0." in capsys.readouterr().out
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert {verdict["answer"] for verdict in result["verdicts"].values()} == {"no-go"}
    assert result["recommended"].startswith("speculation=off")
    rows = {(row["variant"], row["requests"]): row for row in result["rows"]}
    assert {rows[variant, 4]["as_recorded"] for variant in ("stock", "off", "sam")} == {24}
    assert rows["stock", 4]["steps"] == rows["off", 4]["steps"] == 100
    assert rows["sam", 4]["accepted"] > 0


def test_texts_that_come_again_are_new_to_drafters(inputs, tmp_path, capsys, monkeypatch):
    """Of each response no part occurs twice, so that all that could be drafted from is the same response, before."""
    monkeypatch.setattr(rounds, "REST_SECONDS", 0.0)
    texts = [np.random.default_rng(seed).permutation(VOCABULARY)[:60].tolist() for seed in range(3)]
    text = tmp_path / "recording.jsonl"
    rows = [{"prompt_tokens": [1, 2, row], "response_tokens": response} for row, response in enumerate(texts)]
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    load = ["--text", str(text), "--requests", "1", "--samples", "1", "--responses", "6", "--rounds", "1"]
    variants = ["off", "sam", *(["suffix"] if find_spec("arctic_inference") else [])]
    model, output = inputs[:2], inputs[4:]
    assert main([*model, *output, *load, *ENGINE, "--temperature", "1", "--variants", *variants]) == 0
    assert "has 3 prompts or groups, all rounds need 7: some come again" in capsys.readouterr().out
    rows = {row["variant"]: row for row in json.loads((tmp_path / "out" / "result.json").read_text())["rows"]}
    for variant in variants[1:]:
        assert rows[variant]["as_recorded"] == 6 and rows[variant]["accepted"] <= 20, "of 360 tokens"


def test_drafters_of_stock_vllm_emit_the_recording_and_what_came_before_is_known(inputs, tmp_path, capsys, monkeypatch):
    """Side by side from the start: stock's prompt lookup, and sam with an earlier epoch's text: these responses."""
    monkeypatch.setattr(rounds, "REST_SECONDS", 0.0)
    generator = np.random.default_rng(1)
    texts = [generator.permutation(VOCABULARY)[:20].tolist() * 2 for _ in range(10)]
    text = tmp_path / "recording.jsonl"
    rows = [{"prompt_tokens": [1, 2, row], "response_tokens": response} for row, response in enumerate(texts)]
    text.write_text("".join(json.dumps(row) + "\n" for row in rows))
    load = ["--text", str(text), "--history", str(text), "--requests", "2", "--samples", "1", "--rounds", "1"]
    variants = ["--variants", "stock", "stock-v1", "stock-ngram-k4", "sam-k4", "--temperature", "0"]
    assert main([*inputs[:2], *inputs[4:], *load, *variants, *ENGINE]) == 0
    rows = {row["variant"]: row for row in json.loads((tmp_path / "out" / "result.json").read_text())["rows"]}
    assert {row["as_recorded"] for row in rows.values()} == {8}
    assert rows["stock"]["steps"] == rows["stock-v1"]["steps"] == 160, "40 tokens, four batches"
    assert rows["stock-ngram-k4"]["steps"] < 140, "the second half repeats the first"
    assert rows["sam-k4"]["steps"] < 60, "all of it is known"


def test_vllm_does_not_know_an_argument(inputs, tmp_path, capsys):
    assert main([*inputs, *ENGINE, "--variants", "stock", "--max-tokens", "8", "--wings", "2"]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == f"error: stock: unrecognized arguments: --wings 2: see {tmp_path / 'out' / 'stock.log'}"
