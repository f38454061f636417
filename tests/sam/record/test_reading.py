"""Users' files, hundreds of them spoilt: what is read is what another reading gives, or one line says why not."""

import functools
import io
import json
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sam.reading import ReadError
from sam.record.responses import ARRAYS, read_recording
from sam.record.tokenizer import Tokenizer
from tests.sam.record.spoilt import CUTS, EACH, PATHS, VALUES, one_line, spoil_bytes, spoil_value


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


ROWS = [
    {"prompt_tokens": [1, 2], "response_tokens": [5, 6, 5], "note": "a\u2028b"},
    {"prompt_tokens": [1, 2], "response_tokens": [7], "note": "a\x85b\x0c"},
    {"prompt_tokens": [3], "response_tokens": [2**31 - 1, 0], "note": "ü"},
]


def grouped(pairs):
    """(prompt, responses), prompts in their first order."""
    groups = {}
    for prompt, response in pairs:
        groups.setdefault(tuple(prompt), []).append(list(response))
    return [(list(prompt), responses) for prompt, responses in groups.items()]


def texts_of(recording):
    pairs = zip(recording.prompts, recording.responses, strict=True)
    return [(prompt.tolist(), [response.tolist() for response in responses]) for prompt, responses in pairs]


def read_naively(content: bytes):
    """Rows by an independent reading; None where a row is not what it should be."""
    pairs = []
    for line in content.split(b"\n"):
        if line.strip(b" \t\r\f\v\n"):
            row = json.loads(line.decode())
            texts = [row["prompt_tokens"], row["response_tokens"]]
            if not all(type(token) is int and 0 <= token < 2**31 for text in texts for token in text):
                return None
            pairs.append(texts)
    return grouped(pairs)


@EACH
@given(cuts=st.lists(CUTS, max_size=3), path=PATHS, new=VALUES, is_ascii=st.booleans())
def test_rows_are_read_as_they_stand_or_refused(folder, cuts, path, new, is_ascii):
    rows = ROWS if len(cuts) == 3 else spoil_value(ROWS, path, new)
    lines = [json.dumps(row, ensure_ascii=is_ascii or "\\ud800" in json.dumps(row)) for row in rows]
    content = spoil_bytes("\n".join(lines).encode(), cuts[:2])
    (file := folder / "rows.jsonl").write_bytes(content)
    with one_line(file):
        assert texts_of(read_recording(file)) == read_naively(content)


GOOD = {
    "prompt_tokens": np.array([1, 2, 3], np.int32), "prompt_offsets": np.array([0, 2, 3]),
    "response_tokens": np.array([5, 6, 5, 7, 2**31 - 1]), "response_offsets": np.array([0, 3, 4, 5]),
    "response_prompt": np.array([0, 0, 1], np.int16), "response_epoch": np.array([0, 1, 1], np.uint8),
}  # fmt: skip
DTYPES = ["int8", "uint8", "int32", "int64", "uint64", "float32", "float64", "bool", "U3", "complex64", "M8[s]", "O"]


def packed(arrays) -> bytes:
    np.savez(buffer := io.BytesIO(), **arrays)
    return buffer.getvalue()


def unpacked_naively(arrays):
    """Texts by an independent reading in whole numbers of Python's; None where arrays do not fit each other."""
    lists = {name: array.tolist() for name, array in arrays.items()}
    if not {*ARRAYS} <= lists.keys() or any(arrays[name].ndim != 1 for name in ARRAYS):
        return None
    if any(type(one) is not int or one < 0 for name in lists if name in GOOD for one in lists[name]):
        return None
    texts = {}
    for of in ("prompt", "response"):
        tokens, offsets = lists[f"{of}_tokens"], lists[f"{of}_offsets"]
        if not offsets or offsets != sorted(offsets) or (offsets[0], offsets[-1]) != (0, len(tokens)):
            return None
        texts[of] = [tokens[a:b] for a, b in zip(offsets, offsets[1:], strict=False)]
    groups = [(prompt, []) for prompt in texts["prompt"]]
    for number, response in zip(lists["response_prompt"], texts["response"], strict=True):
        groups[number][1].append(response)
    return groups


@EACH
@given(
    cuts=st.lists(CUTS, max_size=2),
    name=st.sampled_from(list(GOOD)),
    at=st.integers(0, 9),
    value=st.integers(-(2**40), 2**40) | st.integers(-3, 6),
    dtype=st.sampled_from(DTYPES),
    how=st.sampled_from(["value", "dtype", "shape", "less", "more", "gone", "name"]),
)
def test_arrays_are_read_as_they_stand_or_refused(folder, cuts, name, at, value, dtype, how):
    arrays, array = dict(GOOD), GOOD[name]
    with np.errstate(all="ignore"):
        changed = array.astype(np.int64)
        changed[at % len(array)] = value
        arrays[name] = {
            "value": changed,
            "dtype": array.astype(dtype),
            "shape": np.stack([array] * 2) if at % 2 else array[:1].reshape(()),
            "less": array[: at % len(array)],
            "more": np.append(array, array[: 1 + at]),
        }.get(how, array)
    if how in ("gone", "name"):
        del arrays[name]
        arrays |= {name.upper(): array} if how == "name" else {}
    (file := folder / "arrays.npz").write_bytes(spoil_bytes(packed(arrays), cuts if at % 2 else []))
    with one_line(file):
        assert texts_of(read_recording(file)) == unpacked_naively(arrays)


TEXT = "the quick brown fox jumps over the lazy dog, twice: the quick brown fox"
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": TEXT}]
TEMPLATE = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' }}{{ m['content'] | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer_json():
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "th", "Ġthe", "<s>"])}
    fast = Fast(models.BPE(vocab=vocabulary, merges=[("t", "h")]))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", vocabulary["<s>"])])
    return json.loads(fast.to_str())


SIDES = st.sampled_from(["Left", "Right"])
TRUNCATIONS = st.none() | st.fixed_dictionaries({
    "direction": SIDES, "max_length": st.integers(0, 40), "stride": st.integers(0, 3),
    "strategy": st.sampled_from(["LongestFirst", "OnlyFirst", "OnlySecond"]),
})  # fmt: skip
PADDINGS = st.none() | st.fixed_dictionaries({
    "strategy": st.just("BatchLongest") | st.fixed_dictionaries({"Fixed": st.integers(0, 200)}), "direction": SIDES,
    "pad_to_multiple_of": st.none() | st.integers(1, 64), "pad_id": st.integers(0, 5), "pad_type_id": st.just(0),
    "pad_token": st.just("!"),
})  # fmt: skip


@EACH
@given(
    truncation=TRUNCATIONS,
    padding=PADDINGS,
    cuts=st.lists(CUTS, max_size=1),
    path=st.none() | PATHS,
    new=VALUES,
    text=st.sampled_from([TEXT, "", "\ud800", None, 5, "日本 \x00"]),
    special=st.booleans(),
)
def test_a_tokenizer_gives_whole_texts_or_is_refused(
    folder, tokenizer_json, truncation, padding, cuts, path, new, text, special
):
    from tokenizers import Tokenizer as Fast

    whole = tokenizer_json | {"truncation": truncation, "padding": padding}
    whole = whole if path is None else spoil_value(whole, path, new)
    content = spoil_bytes(json.dumps(whole).encode(), cuts)
    (folder / "tokenizer.json").write_bytes(content)
    with one_line(folder, "here: expected a text", "here: the tokenizer"):
        found = Tokenizer(folder).encode(text, "here", special)
        plain = json.loads(content) | {"truncation": None, "padding": None}
        assert found == Fast.from_str(json.dumps(plain)).encode(text, add_special_tokens=special).ids


def test_a_tokenizer_gives_what_transformers_gives(folder, tokenizer_json):
    from transformers import PreTrainedTokenizerFast

    held = {"direction": "Right", "max_length": 16, "strategy": "LongestFirst", "stride": 0}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json | {"truncation": held}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(folder), Tokenizer(folder)
    assert ours.encode(TEXT, "here", special=True) == theirs.encode(TEXT)
    assert ours.chat(CHAT, "here") == theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert len(ours.chat(CHAT, "here")) > len(ours.encode(TEXT, "here")) > 16


@EACH
@given(cuts=st.lists(CUTS, max_size=2), path=PATHS, new=VALUES, is_raising=st.booleans())
def test_a_chat_is_laid_out_whole_or_refused(folder, tokenizer_json, cuts, path, new, is_raising):
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json))
    template = spoil_bytes(TEMPLATE.encode(), cuts).decode(errors="replace")
    if is_raising:
        refuse = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no\nsystem role') }}{% endif %}"
        template = refuse + template
    chat = spoil_value(CHAT, path, new)
    tokenizer = Tokenizer(folder)
    tokenizer.whole = whole = transformers_tokenizer(folder)
    whole.chat_template = template
    with one_line("line 3"):
        found = tokenizer.chat(chat, f"{folder}/chats.jsonl, line 3")
        text = whole.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        assert whole.decode(found) == text and all(message["role"] for message in chat)


@functools.cache
def transformers_tokenizer(folder):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def test_a_line_says_file_row_and_what_was_expected(tmp_path):
    file = tmp_path / "a.jsonl"
    for row, said in (
        ([1], "line 2: expected a JSON object, got [1]"),
        (ROWS[2] | {"response_tokens": None}, "line 2, response_tokens: expected a list of token ids, got None"),
        (ROWS[2] | {"response_tokens": [1, 2**40]}, "line 2, response_tokens[1]: expected a token id, 0 to"),
        (ROWS[2] | {"given_spans": [[1, 3]]}, "line 2, given_spans: expected pairs of numbers that rise from 1 to 2"),
        (
            ROWS[2] | {"given_spans": [1]},
            "line 2, given_spans: expected pairs of numbers that rise from 1 to 2, got [1]",
        ),
        (ROWS[2] | {"prompt_tokens": [True]}, "line 2, prompt_tokens[0]: expected a token id"),
        ({"input": "a", "output": "b"}, "line 2: expected a row with prompt_tokens and response_tokens"),
    ):
        file.write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(row))
        with pytest.raises(ReadError) as caught:
            read_recording(file)
        assert f"{file}, {said}" in str(caught.value)
    for change, said in (
        ({"response_prompt": np.array([0, 0, 2])}, "response_prompt[2]: expected 0 to 1, got 2"),
        ({"response_tokens": np.array([5, 6, 5, -1, 7])}, "response_tokens[3]: expected 0 to 2147483647, got -1"),
        ({"response_tokens": np.array([5.0, 6, 5, 1, 7])}, "response_tokens: expected whole numbers, got 'float64'"),
        ({"response_offsets": np.array([0, 3, 4, 4])}, "response_offsets: expected offsets that rise from 0 to 5"),
    ):
        (file := tmp_path / "a.npz").write_bytes(packed(GOOD | change))
        with pytest.raises(ReadError) as caught:
            read_recording(file)
        assert f"{file}, {said}" in str(caught.value)


def test_a_member_that_is_there_twice_is_refused(tmp_path):
    (file := tmp_path / "a.npz").write_bytes(packed(GOOD))
    with zipfile.ZipFile(file, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("prompt_tokens.npy", archive.read("prompt_tokens.npy"))
    with pytest.raises(ReadError, match="there twice"):
        read_recording(file)
