"""Users' files: what is read is what stands there, or one line says why not."""

import io
import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sam.reading import ReadError
from sam.record.responses import read_metrics, read_recording

ROWS = [
    {"prompt_tokens": [1, 2], "response_tokens": [5, 6, 5], "note": "a\u2028b"},
    {"prompt_tokens": [1, 2], "response_tokens": [7], "note": "a\x85b\x0c"},
    {"prompt_tokens": [3], "response_tokens": [2**31 - 1, 0], "note": "ü"},
]
GOOD = {
    "prompt_tokens": [1, 2, 3], "prompt_offsets": [0, 2, 3], "response_tokens": [5, 6, 5, 7, 8],
    "response_offsets": [0, 3, 4, 5], "response_prompt": [0, 0, 1],
}  # fmt: skip


def read_naively(content: bytes):
    """Rows by an independent reading; None where a row is not what it should be."""
    groups = {}
    for line in content.split(b"\n"):
        if line.strip(b" \t\r\f\v\n"):
            row = json.loads(line.decode())
            texts = [row["prompt_tokens"], row["response_tokens"]]
            if not all(type(token) is int and 0 <= token < 2**31 for text in texts for token in text):
                return None
            groups.setdefault(tuple(texts[0]), []).append(texts[1])
    return [(list(prompt), responses) for prompt, responses in groups.items()]


SPOILT = [None, True, -1, 0, 0.5, 2**31, float("nan"), "", "x\u2028y", "\ud800", [], [1], [[1]], [None], {}, {"a": 1}]
CUTS = st.tuples(st.integers(0, 2**16), st.binary(max_size=4), st.integers(0, 4))


@settings(max_examples=500, deadline=None, derandomize=True, database=None)
@given(
    cuts=st.lists(CUTS, max_size=2),
    row=st.integers(0, 2),
    name=st.sampled_from(["prompt_tokens", "response_tokens"]),
    new=st.sampled_from(SPOILT),
    whole=st.booleans(),
)
def test_rows_are_read_as_they_stand_or_refused(tmp_path_factory, cuts, row, name, new, whole):
    """With a value replaced, or one in its list, and bytes put in, left out and replaced."""
    rows = [dict(one) for one in ROWS]
    rows[row][name] = new if whole else [*rows[row][name], new]
    content = "\n".join(map(json.dumps, rows)).encode()
    for place, more, left_out in cuts:
        at = place % (len(content) + 1)
        content = content[:at] + more + content[at + left_out :]
    (file := tmp_path_factory.getbasetemp() / "rows.jsonl").write_bytes(content)
    try:
        found = read_recording(file)
        texts = [[response.tolist() for response in its] for its in found.responses]
        assert list(zip([prompt.tolist() for prompt in found.prompts], texts, strict=True)) == read_naively(content)
    except ReadError as error:
        assert "\n" not in str(error) and str(file) in str(error)


def packed(**changed) -> bytes:
    np.savez(buffer := io.BytesIO(), **(GOOD | changed))
    return buffer.getvalue()


SHAPES = {
    "as it is": lambda array: array,
    "one value": lambda array: array[0],
    "two dimensions": lambda array: array[None],
    "none": lambda array: array[:0],
    "one more": lambda array: np.append(array, array[-1]),
}


def arrays_naively(arrays):
    """Prompts, their responses and epochs by an independent reading; None where an array is not what it should be."""
    if any(array.ndim != 1 or array.dtype.kind not in "iu" for array in arrays.values()):
        return None
    lists = {name: array.tolist() for name, array in arrays.items()}
    texts = {}
    for kind in ("prompt", "response"):
        tokens = lists[f"{kind}_tokens"]
        offsets = lists[f"{kind}_offsets"]
        rises = offsets[:1] == [0] and offsets[-1] == len(tokens) and offsets == sorted(offsets)
        if not rises or not all(0 <= token < 2**31 for token in tokens):
            return None
        texts[kind] = [tokens[begin:end] for begin, end in itertools.pairwise(offsets)]
    prompt_of, epochs = lists["response_prompt"], lists["response_epoch"]
    fits = len(texts["response"]) == len(prompt_of) == len(epochs) and min(epochs) >= 0
    if not fits or not all(texts["prompt"]) or not set(prompt_of) <= set(range(len(texts["prompt"]))):
        return None
    rows = [[i for i, one in enumerate(prompt_of) if one == prompt] for prompt in range(len(texts["prompt"]))]
    return (
        texts["prompt"],
        [[texts["response"][i] for i in row] for row in rows],
        [[epochs[i] for i in r] for r in rows],
    )


@settings(max_examples=600, deadline=None, derandomize=True, database=None)
@given(
    name=st.sampled_from([*GOOD, "response_epoch"]),
    shape=st.sampled_from(list(SHAPES)),
    kind=st.sampled_from(["i8", "u1", ">i4", "u8", "f8", "f2", "?", "U4", "S4", "c8", "M8[s]"]),
    last=st.sampled_from([None, None, 0, 1, -1, 2**40, 2**63, 0.5, float("nan")]),
)
def test_arrays_are_read_as_they_stand_or_refused(tmp_path_factory, name, shape, kind, last):
    """In another shape, of another kind, and with another last value of any kind."""
    arrays = {key: np.array(value) for key, value in (GOOD | {"response_epoch": [0, 1, 1]}).items()}
    array = SHAPES[shape](arrays[name])
    if last is not None and array.ndim == 1 and len(array):
        array = np.array([*array[:-1].tolist(), last])
    else:
        array = array.astype(kind)
    arrays[name] = array
    if array.dtype.kind == "O":
        return  # numpy pickles these, and does not read them
    (file := tmp_path_factory.getbasetemp() / "arrays.npz").write_bytes(packed(**arrays))
    wanted = arrays_naively(arrays)
    try:
        found = read_recording(file)
        texts = [[response.tolist() for response in its] for its in found.responses]
        assert ([prompt.tolist() for prompt in found.prompts], texts, found.epochs) == wanted
    except ReadError as error:
        assert wanted is None and "\n" not in str(error) and str(file) in str(error)


ROW = ROWS[2]
np.save(NPY := io.BytesIO(), np.arange(3))
SAID = {
    ", line 2: expected a JSON object, got [1]": [1],
    ", line 2, response_tokens[1]: expected a token id, 0 to": ROW | {"response_tokens": [1, 2**40]},
    ", line 2, given_spans: expected pairs of numbers from 0 to 2": ROW | {"given_spans": [[1, 3]]},
    ", line 2: expected a row with prompt_tokens and response_tokens, or output or response or answer": {"prompt": [1]},
    " holds text: name its tokenizer with --tokenizer": {"input": "a", "output": "b"},
    ", response_prompt: expected 3 numbers below 2, got [0, 0, 2]": packed(response_prompt=[0, 0, 2]),
    ", response_prompt: expected 3 numbers below 2, got [0, 0]": packed(response_prompt=[0, 0]),
    ", response_tokens[3]: expected a token id, 0 to 2147483647, got -1": packed(response_tokens=[5, 6, 5, -1, 7]),
    ", response_offsets: expected offsets that rise from 0 to 5": packed(response_offsets=[0, 3, 4, 4]),
    ", response_offsets: expected 1-dimensional integers, got float64 of": packed(response_offsets=[0, 3, 4, 5.0]),
    ", response_epoch: expected 1-dimensional integers, got <U1 of shape [3]": packed(response_epoch=["a", "b", ""]),
    ", response_epoch: expected 3 numbers, got [1]": packed(response_epoch=[1]),
    ": not an .npz file of arrays": b"PK",
    ": expected an .npz file of arrays, got an .npy file of one array": NPY.getvalue(),
    ", line 2, given_spans: expected pairs of numbers from 0 to 2, rising": ROW | {"given_spans": [[0.5, 1]]},
}


@pytest.mark.parametrize("said", SAID)
def test_a_line_says_file_place_and_what_was_expected(tmp_path, said):
    if isinstance(content := SAID[said], bytes):
        (file := tmp_path / "a.npz").write_bytes(content)
    else:
        (file := tmp_path / "a.jsonl").write_text(json.dumps(ROWS[0]) + "\n" + json.dumps(content))
    with pytest.raises(ReadError) as caught:
        read_recording(file)
    assert f"{file}{said}" in str(caught.value)


def test_figures_of_a_run(tmp_path):
    (metrics := tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "a": 1, "b": NaN}\n{"step": 2, "a": "x"}\n{"step": 1, "c": 2}\n{"step": 3, "a'
    )
    left_out = []
    assert read_metrics(tmp_path, left_out) == {1: {"a": 1.0, "c": 2.0}}
    assert left_out == [f"{metrics}, line 2, a: expected a number, got 'x'"]
    with pytest.raises(ReadError, match="line 2, a: expected a number"):
        read_metrics(tmp_path)
