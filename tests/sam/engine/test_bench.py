"""`sam bench` on real engines, each in a process of its own: stock vLLM, sam and a draft model."""

import json
import shutil

import numpy as np
import pytest

from recipe.sam_dapo.bench import main
from sam.tools.bench.settings import Settings
from tests.sam.engine.tiny_engine import VOCABULARY

pytestmark = pytest.mark.engine

ENGINE = ["--skip-tokenizer-init", "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "16"]
ENGINE += ["--kv-cache-memory-bytes", str(256 << 20)]  # other tests run beside these


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Runs the command; returns its rows by variant and load. Drafters of this project draft whatever the clock says:
    goodput stops one that a busy machine slows down."""
    speculation = Settings._speculation
    monkeypatch.setattr(Settings, "_speculation", lambda *told: speculation(*told) | {"policy": "always"})

    def run(rows, option, model, *words):
        (tmp_path / "asked.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        common = ["--model", model, "--output", tmp_path / "out", option, tmp_path / "asked.jsonl", "--rounds", "1"]
        assert main([*map(str, common), *ENGINE, *words]) == 0
        result = json.loads((tmp_path / "out" / "result.json").read_text())
        assert result["warnings"] == []
        return {(row["variant"], row["requests"]): row for row in result["rows"]}

    return run


def test_sam_and_a_draft_model_beside_it(bench, model):
    """The target drafts for itself, so that its drafts are accepted whatever it says."""
    chance = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": chance.integers(0, VOCABULARY, 8).tolist()} for _ in range(9)]
    load = ["--requests", "8", "--samples", "4", "--max-tokens", "120", "--temperature", "0.3", "--ignore-eos"]
    variants = ["--variants", "off", "sam", "hybrid", "--draft-model", model.path, "--draft-tokens", "3"]
    rows = bench(prompts, "--prompts", model.path, *load, *variants)
    off, *drafting = (rows[variant, 8] for variant in ("off", "sam", "hybrid"))
    assert off["drafted"] == 0 and off["steps"] == 120 > drafting[0]["steps"]
    for row in drafting:
        assert row["identical"] == row["responses"] == 8 and row["draft_errors"] == 0 < row["accepted"]
    assert drafting[0]["acceptance_length"] > 1


def test_forced_text_on_a_config_alone(bench, model, tmp_path):
    """As a GPU is measured that has no network and is lent for minutes: random weights, no tokenizer, real text is
    emitted, and the same words go on. Each response repeats its first third."""
    (tmp_path / "config alone").mkdir()
    shutil.copy(f"{model.path}/config.json", tmp_path / "config alone")
    texts = [np.random.default_rng(seed).permutation(VOCABULARY)[:40].tolist() for seed in range(7)]
    text = [{"prompt_tokens": [1, 2, seed], "response_tokens": one + one[:20]} for seed, one in enumerate(texts)]
    load = ["--requests", "1", "--samples", "1", "--responses", "6", "--load-format", "dummy", "--resume"]
    words = (text, "--text", tmp_path / "config alone", *load, "--variants", "stock", "sam")
    rows = bench(*words)
    stock, sam = rows["stock", 1], rows["sam", 1]
    assert stock["responses"] == sam["responses"] == 6 and stock["steps"] == 360 > sam["steps"]
    assert stock["drafted"] is None and 6 * 10 < sam["accepted"] <= 6 * 20
    assert bench(*words) == rows, "nothing is left to do"


def test_a_device_that_does_not_draft_is_not_measured(model, tmp_path, capsys):
    prompts = [json.dumps({"prompt_token_ids": [1, 2, group]}) for group in range(25)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(prompts))
    words = ["--model", model.path, "--prompts", tmp_path / "prompts.jsonl", "--output", tmp_path, "--requests", "1"]
    assert main([*map(str, words), *ENGINE, "--ignore-eos", "--variants", "off", "sam-device"]) == 2
    assert "sam-device: the host drafts in this engine" in capsys.readouterr().err
