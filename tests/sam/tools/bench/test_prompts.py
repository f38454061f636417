"""Prompts of files as tokens, and groups of recordings."""

import json

import pytest

from sam.reading import ReadError
from sam.tools.bench.prompts import read_groups, read_prompts

CHAT = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no\nsystem role') }}{% endif %}"
    "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}99{% endif %}"
)


@pytest.fixture
def model(tmp_path):
    """A folder with a tokenizer of words that are numbers; in its files is what a training call has left there."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from tokenizers.processors import TemplateProcessing

    words = {"bos": 100} | {str(number): number for number in range(100)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing("bos $A", special_tokens=[("bos", 100)])
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=9)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def test_text_token_ids_and_chats(tmp_path, model):
    rows = [{"prompt": "5 6 7"}, {"prompt_token_ids": [1, 2]}, {"prompt": [{"role": "user", "content": "3 4"}]}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert read_prompts(path, model) == [[100, 5, 6, 7], [1, 2], [3, 4, 99]]
    pandas = pytest.importorskip("pandas")
    table = tmp_path / "prompts.parquet"
    pandas.DataFrame({"prompt": ["3 4", "5"], "data_source": ["a", "b"]}).to_parquet(table)
    assert read_prompts(table, model) == [[100, 3, 4], [100, 5]] and read_prompts(table, model, 1) == [[100, 3, 4]]
    (dump := tmp_path / "dump.jsonl").write_text('{"input": "1 2", "output": "3 4 5"}')
    assert read_groups(dump, model, 1) == ([([1, 2], [[3, 4, 5]])], [])


def test_text_that_a_tokenizer_refuses_is_one_line(tmp_path, model):
    path = tmp_path / "prompts.jsonl"
    for prompt, said in (
        (5, ": neither a text or a chat as prompt nor prompt_token_ids in it"),
        ([], ", prompt: expected a chat, a list of messages, got []"),
        (["a"], ", prompt[0]: expected a message with role and content, got 'a'"),
        ([{"role": "system", "content": "a"}], f", prompt: the chat template of {model} refuses it (no system role)"),
    ):
        path.write_text(json.dumps({"prompt": prompt}))
        with pytest.raises(ReadError) as refused:
            read_prompts(path, model)
        assert str(refused.value) == f"{path}, line 1{said}"
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(ReadError, match="not a tokenizer"):
        read_prompts(path, model)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("tokenizer_config.json", b'{"chat_template": "{% if"}', "unexpected 'end of template'"),
        ("tokenizer_config.json", b'{"chat_template": "{{ lay_out(messages) }}"}', "'lay_out' is undefined"),
        ("tokenizer_config.json", b"{}", "Cannot use chat template functions because"),
        ("chat_template.jinja", b"# A model", "it leaves out what messages say"),
        ("chat_template.jinja", b"PK\xff", "'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_a_chat_template_that_is_none_is_named_as_the_file_that_it_is(tmp_path, model, name, content, said):
    (path := tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "3"}]}))
    (model / name).write_bytes(content)
    with pytest.raises(ReadError) as refused:
        read_prompts(path, model)
    assert str(refused.value).startswith(f"{model / name}: not a chat template ({said}")


def test_a_large_group_gives_several_and_other_prompts_come_first(tmp_path):
    rows = [([1], [i] * 3) for i in range(5)] + [([2], [7]), ([2], [8]), ([3], [9])]
    lines = [json.dumps({"prompt_tokens": prompt, "response_tokens": response}) + "\n" for prompt, response in rows]
    for step, part in ((2, lines[:5]), (10, lines[5:])):  # steps of a run, in their order
        (tmp_path / "rollouts").mkdir(exist_ok=True)
        (tmp_path / "rollouts" / f"{step}.jsonl").write_text("".join(part))
    groups, notes = read_groups(tmp_path, None, 2, max_tokens=2)
    assert groups == [([1], [[0] * 2, [1] * 2]), ([2], [[7], [8]]), ([1], [[2] * 2, [3] * 2])]
    assert notes == ["1 of 3 prompts have fewer than 2 responses and are left out"]
    row = {"prompt_tokens": [9], "response_tokens": [0, 1, 77, 6], "given_spans": [[2, 3]]}
    (tmp_path / "rollouts" / "11.jsonl").write_text(json.dumps(row))
    with pytest.raises(ReadError, match="responses with tools' outputs: expected text of the model alone"):
        read_groups(tmp_path, None, 2)
