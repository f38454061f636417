"""A corpus: what is read of it, in which order, how much, and what is refused in one line."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer as Built
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sam.reading import ReadError
from sam.record.corpus import read_corpus

WORDS = "the sum is so we add two and then three".split()


def tokenizer_of(folder, words):
    """A folder with a tokenizer that knows each word as a token."""
    built = Built(models.WordLevel({word: number for number, word in enumerate([*words, "?"])}, unk_token="?"))
    built.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=built, unk_token="?").save_pretrained(folder)
    return str(folder)


@pytest.fixture
def tokenizer(tmp_path):
    return tokenizer_of(tmp_path / "model", WORDS)


def lines(path, *rows):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def ids(*responses):
    return [{"prompt_tokens": [1], "response_tokens": response} for response in responses]


def responses_of(texts):
    return [response.tolist() for _prompt, response in texts]


def test_rows_of_texts_of_every_kind_are_read(tmp_path, tokenizer):
    chat = [{"role": "user", "content": "add"}, {"role": "assistant", "content": "the sum"}]
    with open(tmp_path / "model" / "chat_template.jinja", "w") as file:
        file.write("{% for m in messages %}{{ m.content }}{% endfor %}")
    rows = [{"input": "add", "output": "is so"}, {"prompt": "two", "response": "we add"}, {"messages": chat}]
    texts = read_corpus([lines(tmp_path / "dump" / "1.jsonl", *rows)], 100, tokenizer)
    assert responses_of(texts) == [[2, 3], [4, 5], [0, 1]]
    assert [prompt.tolist() for prompt, _response in texts] == [[5], [6], [5]]
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist(rows[1:2])
    parquet.write_table(table, tmp_path / "data.parquet")
    assert responses_of(read_corpus([tmp_path / "data.parquet"], 100, tokenizer)) == [[4, 5]]


def test_the_latest_step_comes_first_and_no_more_is_read_than_asked_for(tmp_path):
    for step, response in ((2, [2, 2]), (10, [1, 1, 1])):
        lines(tmp_path / "run" / "rollouts" / f"{step}.jsonl", *ids(response))
    arrays = {"prompt_tokens": [7], "prompt_offsets": [0, 1], "response_tokens": [3, 4], "response_offsets": [0, 2]}
    np.savez(tmp_path / "text.npz", **arrays, response_prompt=[0])
    paths = [tmp_path / "run", tmp_path / "text.npz"]
    assert responses_of(read_corpus(paths, 100)) == [[1, 1, 1], [2, 2], [3, 4]]
    assert responses_of(read_corpus(paths, 4)) == [[1, 1, 1], [2]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, "no such file"),
        ([], "expected responses in it, got 'none'"),
        (ids([3, 500]), "token 500, the model knows 0 to 10: it is of another tokenizer than the model"),
        ([{"note": "a"}], "line 1: expected a row with prompt_tokens and response_tokens, or output or response or"),
        ([{"response": 3}], "line 1, response: expected a text, got 3"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path, tokenizer, rows, message):
    path = tmp_path / "corpus.jsonl"
    if rows is not None:
        lines(path, *rows)
    with pytest.raises(ReadError, match=message) as raised:
        read_corpus([path], 100, tokenizer, 11)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


def test_token_ids_of_another_tokenizer_are_refused_where_all_are_in_the_vocabulary(tmp_path):
    """This one writes some words of others' tokens otherwise: its text, encoded again, is other tokens."""
    built = Built(models.BPE({"a": 0, "b": 1, "ab": 2, "ba": 3, "c": 4}, [("a", "b"), ("b", "a")]))
    PreTrainedTokenizerFast(tokenizer_object=built).save_pretrained(tmp_path / "model")
    own, other = lines(tmp_path / "own.jsonl", *ids([2, 4] * 30)), lines(tmp_path / "other.jsonl", *ids([0, 1] * 30))
    assert len(read_corpus([own], 100, str(tmp_path / "model"))) == 1
    with pytest.raises(
        ReadError, match="other.jsonl: 0% of its tokens are those that .* makes of their text: it is of"
    ):
        read_corpus([other], 100, str(tmp_path / "model"))
