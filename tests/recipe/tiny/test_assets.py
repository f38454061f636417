import json
import re
import threading
from dataclasses import replace

import pandas
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from recipe.tiny.assets import AssetSettings, draw_splits, prepare_assets
from recipe.tiny.model import ModelSettings, build_model
from recipe.tiny.task import Problem, TaskSettings
from recipe.tiny.tokenizer import build_tokenizer, encode_prompt
from recipe.tiny.warm_start import IGNORED, WarmStartSettings, draw_batches, warm_start

SMALL = AssetSettings(
    train_rows=20,
    val_rows=4,
    model=ModelSettings(32, 32, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1),
    warm_start=WarmStartSettings(steps=3, warmup_steps=1, tokens_per_step=1024),
)


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    output = tmp_path_factory.mktemp("tiny") / "assets"
    assert prepare_assets(output, SMALL)
    return output


def test_model_and_tokenizer_load_and_agree(assets):
    tokenizer = AutoTokenizer.from_pretrained(assets / "model")
    model = AutoModelForCausalLM.from_pretrained(assets / "model")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.config.vocab_size == len(tokenizer) <= 300
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert (model.config.eos_token_id, model.config.pad_token_id) == (
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
    )
    assert model.dtype == torch.float32
    assert encode_prompt(tokenizer, "from a to c begin 1 2") == encode_prompt(
        build_tokenizer(), "from a to c begin 1 2"
    )


def test_data_is_verls_format(assets):
    train, validation = (pandas.read_parquet(assets / f"{split}.parquet") for split in ("train", "val"))
    assert (len(train), len(validation)) == (20, 4)
    for row in (*train.to_dict("records"), *validation.to_dict("records")):
        begin, end, first, second = re.findall(r"\b[a-z]\b|\d", row["prompt"][0]["content"])
        problem = Problem(ord(begin) - ord("a"), ord(end) - ord(begin) + 1, int(first), int(second))
        assert row["data_source"] == "tiny_additive_sequence"
        assert row["prompt"][0]["content"] == problem.question
        assert row["reward_model"]["ground_truth"] == problem.answer
        assert row["extra_info"]["lines"] == problem.lines


def test_a_second_call_changes_nothing(assets):
    before = {path: path.stat().st_mtime_ns for path in assets.rglob("*")}
    assert not prepare_assets(assets, SMALL)
    assert {path: path.stat().st_mtime_ns for path in assets.rglob("*")} == before


def test_other_settings_replace_what_is_there(tmp_path):
    output = tmp_path / "assets"
    prepare_assets(output, SMALL)
    first = json.loads((output / "assets.json").read_text())["digest"]
    assert prepare_assets(output, replace(SMALL, seed=1))
    assert json.loads((output / "assets.json").read_text())["digest"] != first
    assert sorted(path.name for path in tmp_path.iterdir()) == [".assets.lock", "assets"]


def test_a_folder_with_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ValueError, match="holds something else"):
        prepare_assets(tmp_path, SMALL)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_a_failed_build_leaves_nothing(tmp_path, monkeypatch):
    def fail(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("recipe.tiny.assets.warm_start", fail)
    with pytest.raises(KeyboardInterrupt):
        prepare_assets(tmp_path / "assets", SMALL)
    assert [path.name for path in tmp_path.iterdir()] == [".assets.lock"]


def test_of_two_at_once_one_builds(tmp_path):
    results = []
    callers = [
        threading.Thread(target=lambda: results.append(prepare_assets(tmp_path / "assets", SMALL))) for _ in range(2)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert sorted(results) == [False, True]


def test_the_default_model_is_small():
    model = build_model(ModelSettings(), build_tokenizer(), seed=0)
    assert sum(weights.numel() for weights in model.parameters()) <= 3_000_000
    assert model.config.max_position_embeddings == 2048


def test_training_repeats_exactly_and_learns():
    tokenizer, runs = build_tokenizer(), []
    for _ in range(2):
        model = build_model(SMALL.model, tokenizer, seed=0)
        settings = replace(SMALL.warm_start, steps=12, learning_rate=1e-2)
        losses = warm_start(model, tokenizer, TaskSettings(), settings, excluded=[], seed=0)
        runs.append((losses, model.state_dict()))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(weights, runs[1][1][name]) for name, weights in runs[0][1].items())
    assert runs[0][0][-1] < runs[0][0][0] - 1


def test_training_leaves_torchs_settings_as_found():
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    model = build_model(SMALL.model, build_tokenizer(), seed=0)
    warm_start(model, build_tokenizer(), TaskSettings(), replace(SMALL.warm_start, steps=1), [], seed=0)
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before


def test_batches_predict_responses_only_and_skip_validation():
    tokenizer = build_tokenizer()
    task = TaskSettings(max_lines=2)
    every = {Problem(start, 2, first, second) for start in range(25) for first in range(10) for second in range(10)}
    allowed = Problem(3, 2, 4, 7)
    inputs, targets = next(draw_batches(tokenizer, task, every - {allowed}, seed=0, tokens=128))
    prompt = encode_prompt(tokenizer, allowed.question)
    for row, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
        assert row[: len(prompt)] == prompt
        assert wanted[: len(prompt) - 1] == [IGNORED] * (len(prompt) - 1)
        trained = [(index, token) for index, token in enumerate(wanted) if token != IGNORED]
        assert [index for index, _ in trained] == list(range(len(prompt) - 1, len(prompt) - 1 + len(trained)))
        assert trained[-1][1] == tokenizer.eos_token_id
        assert all(row[index + 1] == token for index, token in trained)


def test_validation_is_kept_out_of_the_warm_start(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("recipe.tiny.assets.warm_start", lambda *arguments: seen.append(arguments[4]))
    prepare_assets(tmp_path / "assets", SMALL)
    assert seen == [draw_splits(SMALL)[1]]
