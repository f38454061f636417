"""Prompts from files, as tokens, and those that the model cannot take."""

import json

import pytest

from sam.bench.loads import Group
from sam.bench.prompts import (
    check_texts,
    digest,
    longest_text,
    model_config,
    question,
    read_prompts,
    tokenizer_of,
)  # fmt: skip

CHAT = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}99{% endif %}"
CONFIG = {"max_position_embeddings": 64, "vocab_size": 100}


@pytest.fixture
def model(tmp_path):
    """A folder with a tokenizer of words that are numbers."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer = Tokenizer(WordLevel({str(number): number for number in range(100)}, unk_token="0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    return path


def test_text_and_token_ids(tmp_path, model):
    path = write(tmp_path / "prompts.jsonl", [{"prompt": "5 6 7"}, {"prompt_token_ids": [1, 2]}])
    assert read_prompts(path, model) == [[5, 6, 7], [1, 2]]


def test_parquet(tmp_path, model):
    pandas = pytest.importorskip("pandas")
    path = tmp_path / "prompts.parquet"
    pandas.DataFrame({"prompt": ["3 4", "5"], "data_source": ["a", "b"]}).to_parquet(path)
    assert read_prompts(path, model) == [[3, 4], [5]]


def test_chats_of_the_recipe(tmp_path, model):
    pandas = pytest.importorskip("pandas")
    (model / "tokenizer_config.json").write_text(
        json.dumps({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": CHAT,
        })
    )  # fmt: skip
    path = tmp_path / "train.parquet"
    pandas.DataFrame({"prompt": [[{"role": "user", "content": "3 4"}]]}).to_parquet(path)
    assert read_prompts(path, model) == [[3, 4, 99]]


def test_built_in_prompts_differ(model):
    assert len(read_prompts(None, model, 40)) == 40
    assert len({question(number) for number in range(2000)}) == 2000


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("prompts.txt", "x", "expected .jsonl or .parquet"),
        ("missing.jsonl", None, "no such file"),
        ("prompts.jsonl", "", "no prompts in it"),
        ("prompts.jsonl", "{", "line 1: not JSON"),
        ("prompts.jsonl", '{"question": "1"}', "line 1: neither a text or a chat as prompt nor prompt_token_ids"),
        ("prompts.jsonl", "[1]", "line 1: expected a JSON object, got .1."),
        (
            "prompts.jsonl",
            '{"prompt": "1"}\n{"prompt": "1", "prompt_token_ids": [1.5]}',
            "line 2, prompt_token_ids.0.: ",
        ),
        ("prompts.jsonl", '{"prompt": ["1"]}', "line 1, prompt.0.: expected a message with role and content"),
        ("prompts.parquet", "x", "not a parquet file"),
    ],
)
def test_files_that_hold_no_prompts(tmp_path, model, name, content, message):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_prompts(tmp_path / name, model)
    assert "\n" not in str(caught.value)


def test_text_needs_a_tokenizer(tmp_path):
    with pytest.raises(ValueError, match="prompt 1: it is text, and the model's folder has no tokenizer"):
        read_prompts(None, None, 1)


def test_which_tokenizer(tmp_path, model):
    assert tokenizer_of(model, []) == model and tokenizer_of(tmp_path / "nowhere", []) is None
    assert tokenizer_of(tmp_path, ["--tokenizer", str(model)]) == model
    with pytest.raises(ValueError, match="nowhere: no tokenizer there; expected a folder with one"):
        tokenizer_of(model, ["--tokenizer=nowhere"])


@pytest.mark.parametrize("prompt", ["1", [{"role": "user", "content": "1"}]])
def test_a_tokenizer_that_is_none(tmp_path, prompt):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="not a tokenizer") as caught:
        read_prompts(write(tmp_path / "prompts.jsonl", [{"prompt": prompt}]), tmp_path)
    assert "\n" not in str(caught.value)


def test_no_model(tmp_path):
    with pytest.raises(ValueError, match="no config.json there; expected the folder of a model"):
        model_config(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([1] * 50, "prompt 2 has 50 tokens, with --max-tokens 16 that is more than the 64 that the model takes"),
        ([], "prompt 2 is empty"),
        ([7, 100], "prompt 2 has token 100, the model knows 0 to 99"),
    ],
)
def test_prompts_that_the_model_cannot_take(prompt, message):
    with pytest.raises(ValueError, match=message):
        check_texts([Group([1]), Group(prompt)], 16, CONFIG, [], "here")


@pytest.mark.parametrize(
    "response, message",
    [
        ([1] * 60, "here: prompt 1 has 5 tokens, with 60 of a response that is more than the 64"),
        ([7, -1], "a response to prompt 1 has token -1, the model knows 0 to 99: it is of another tokenizer"),
    ],
)
def test_responses_that_the_model_cannot_emit(response, message):
    check_texts([Group([1] * 5, [[1] * 59])], 100, CONFIG, [], "here")
    with pytest.raises(ValueError, match=message):
        check_texts([Group([1] * 5, [[2], response])], 100, CONFIG, [], "here")


def test_how_long_a_text_may_be():
    assert longest_text(CONFIG, []) == 64
    assert longest_text(CONFIG, ["--max-model-len", "32"]) == 32
    assert longest_text(CONFIG, ["--max-model-len=4k"]) is None  # vLLM checks
    assert longest_text(CONFIG | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, []) is None


def test_a_model_that_reads_pictures_has_the_sizes_of_its_text(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"text_config": CONFIG}))
    config = model_config(tmp_path)
    check_texts([Group([1] * 48)], 16, config, [], "here")
    with pytest.raises(ValueError, match="more than the 64"):
        check_texts([Group([1] * 49)], 16, config, [], "here")


def test_other_prompts_have_another_digest():
    one = [Group([1]), Group([2])]
    assert digest(one) == digest(list(one)) != digest([Group([1], [[2]])])
