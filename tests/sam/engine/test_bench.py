"""`sam bench` on real engines, each in a process of its own: stock vLLM, off, sam and a draft model."""

import functools
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from sam.bench import engines
from sam.bench.engines import EngineProcess
from sam.bench.result import STOCK_SAMPLES
from sam.bench.settings import Settings
from sam_recipe.bench import main
from tests.sam.engine.tiny_engine import VOCABULARY, save_model

pytestmark = pytest.mark.engine

ENGINE = ["--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "16"]
ENGINE += ["--kv-cache-memory-bytes", str(256 << 20)]  # other tests run beside these


@pytest.fixture
def always_drafting(monkeypatch):
    """Drafters of this project draft whatever the clock says: goodput stops one that a busy machine slows down."""
    start = Settings.start

    def always(settings: Settings, variant: str) -> dict:
        told = start(settings, variant)
        return told | ({"speculation": told["speculation"] | {"policy": "always"}} if told["speculation"] else {})

    monkeypatch.setattr(Settings, "start", always)


@pytest.fixture
def bench(tmp_path):
    """Runs the command on a tiny model; returns its exit code and its rows by variant and load."""
    save_model(tmp_path / "model", sharpness=12.0)
    chance = np.random.default_rng(0)
    rows = [{"prompt_token_ids": chance.integers(0, VOCABULARY, 8).tolist()} for _ in range(9)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def run(*words, model="model", text=None):
        asked = ["--prompts", tmp_path / "prompts.jsonl"]
        if text is not None:
            lines = [{"prompt_tokens": [1, 2, group], "response_tokens": response} for group, response in text]
            (tmp_path / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            asked = ["--text", tmp_path / "text.jsonl"]
        common = ["--model", tmp_path / model, "--output", tmp_path / "out", *asked]
        code = main([*map(str, common), "--rounds", "1", *ENGINE, *words])
        result = tmp_path / "out" / "result.json"
        found = json.loads(result.read_text()) if result.exists() else {"rows": [], "warnings": []}
        return code, {(row["variant"], row["requests"]): row for row in found["rows"]}, found["warnings"]

    return run


def test_stock_off_sam_and_a_draft_model_beside_it(bench, always_drafting, tmp_path):
    """The target drafts for itself, so that its drafts are accepted whatever it says."""
    load = ["--requests", "2", "8", "--samples", "4", "--max-tokens", "160", "--temperature", "0.3", "--ignore-eos"]
    variants = ["--variants", "stock", "off", "sam", "hybrid"]
    code, rows, warnings = bench(*load, *variants, "--draft-model", str(tmp_path / "model"), "--draft-tokens", "3")
    assert code == 0 and warnings == [STOCK_SAMPLES]
    for requests in (2, 8):
        stock, off, *drafting = (rows[variant, requests] for variant in variants[1:])
        assert stock["drafted"] is None and off["drafted"] == 0
        assert stock["steps"] == off["steps"] == 160 * 8 // requests
        for row in drafting:
            assert row["identical"] == row["responses"] == 8  # four batches of 2
            assert row["draft_errors"] == 0
    assert all(rows[variant, 8]["accepted"] > 0 for variant in variants[3:])
    assert rows["sam", 8]["acceptance_length"] > 1 and rows["sam", 8]["steps"] < 160


def test_forced_text_on_a_config_alone_and_a_slowed_sam(bench, always_drafting, tmp_path, capsys, monkeypatch):
    """Random weights, no tokenizer, and a drafter that sleeps: real text is emitted, and sam does not pay."""
    slowed = (sys.executable, str(Path(__file__).with_name("slowed_engine.py")))
    monkeypatch.setattr(engines, "EngineProcess", functools.partial(EngineProcess, program=slowed))
    (tmp_path / "config alone").mkdir()
    shutil.copy(tmp_path / "model" / "config.json", tmp_path / "config alone")
    chance = np.random.default_rng(0)
    groups = [(group, chance.integers(0, VOCABULARY, 12).tolist()) for group in range(12)]
    text = [(group, (phrase * 5)[: 20 + 10 * sample]) for group, phrase in groups for sample in range(4)]
    load = ["--requests", "4", "--samples", "4", "--load-format", "dummy", "--rounds", "3"]
    code, rows, _ = bench(*load, "--variants", "stock", "sam", model="config alone", text=text)
    assert code == 0 and "no-go: 0." in capsys.readouterr().out
    assert {row["responses"] for row in rows.values()} == {24} and rows["sam", 4]["accepted"] > 0
    assert rows["stock", 4]["steps"] == 100


def test_vllm_does_not_know_an_argument(bench, tmp_path, capsys):
    assert bench("--variants", "stock", "--requests", "1", "--max-tokens", "8", "--wings", "2", "--responses", "1")[0]
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == f"error: stock: unrecognized arguments: --wings 2: see {tmp_path / 'out' / 'stock.log'}"
