"""The tiny world: built once, loadable by transformers, trained the same way every time."""

from dataclasses import replace

import pandas
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sam_recipe.tiny.assets import AssetSettings, draw_splits, prepare_assets
from sam_recipe.tiny.model import ModelSettings, build_model
from sam_recipe.tiny.task import Problem, TaskSettings, as_row
from sam_recipe.tiny.tokenizer import build_tokenizer, encode_prompt
from sam_recipe.tiny.warm_start import IGNORED, WarmStartSettings, draw_batches, warm_start

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
    assert type(model).__name__ == "Qwen3ForCausalLM" and model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer) <= 300
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    ids = tokenizer.eos_token_id, tokenizer.pad_token_id
    assert (model.config.eos_token_id, model.config.pad_token_id) == ids
    question = "from a to c begin 1 2"
    assert encode_prompt(tokenizer, question) == encode_prompt(build_tokenizer(), question)


def test_rows_are_the_problems_drawn(assets):
    for split, problems in zip(("train", "val"), draw_splits(SMALL), strict=True):
        rows = pandas.read_parquet(assets / f"{split}.parquet").to_dict("records")
        wanted = [as_row(problem, split, index) for index, problem in enumerate(problems)]
        assert [row | {"prompt": list(row["prompt"])} for row in rows] == wanted


def test_it_is_built_once_and_validation_is_kept_out_of_the_warm_start(assets, tmp_path, monkeypatch):
    """tests/recipe/test_record.py has when a folder is built anew."""
    assert not prepare_assets(assets, SMALL)

    def stop(*arguments):
        assert arguments[4] == draw_splits(SMALL)[1]
        raise KeyboardInterrupt

    monkeypatch.setattr("sam_recipe.tiny.assets.warm_start", stop)
    with pytest.raises(KeyboardInterrupt):
        prepare_assets(tmp_path / "assets", SMALL)


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
