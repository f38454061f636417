"""Step-cost tables: looked up between and beyond their points, and refused where they cannot be true."""

import json

import numpy as np
import pytest

from sam.switch.step_cost import StepCost

CELLS = np.array([[[10.0, 20.0], [12.0, 26.0]], [[14.0, 28.0], [30.0, 60.0]]])


def make(**changed):
    arguments = {
        "requests": np.array([1, 9]),
        "tokens_per_request": np.array([1, 3]),
        "context": np.array([100, 200]),
        "milliseconds": CELLS,
        "fingerprint": {"model": "tiny", "device": "cpu"},
        "source": "a test",
    }
    return StepCost(**{**arguments, **changed})


@pytest.mark.parametrize(
    "requests, rows, context, expected",
    [
        (1, 2, 100, 11.0),
        (1, 3, 150, 19.0),
        (5, 5, 100, 12.0),
        (9, 27, 1000, 60.0),
        (1, 5, 100, 14.0),  # beyond the most tokens the last slope goes on
        (18, 18, 100, 28.0),  # beyond the most requests each brings what the last ones brought
    ],
)
def test_values(requests, rows, context, expected):
    assert make().step_ms(requests, rows, context) == pytest.approx([expected])


def test_saved_and_loaded(tmp_path):
    make().save(tmp_path / "cost.json")
    loaded = StepCost.load(tmp_path / "cost.json")
    assert np.array_equal(loaded.milliseconds, make().milliseconds)
    assert (loaded.fingerprint, loaded.source) == (make().fingerprint, "a test")


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"requests": np.array([], int)}, r"requests=\[\]: expected integers from 1"),
        ({"requests": np.array([4, 2])}, r"requests=\[4, 2\]: expected rising"),
        ({"context": np.array([0, 5])}, r"context=\[0, 5\]: expected integers from 1"),
        ({"tokens_per_request": np.array([2, 3])}, "expected integers from 1"),
        ({"milliseconds": np.ones((2, 2, 1))}, r"shape \[2, 2, 1\]: the axes ask for \[2, 2, 2\]"),
        ({"milliseconds": np.zeros((2, 2, 2))}, "expected positive times"),
        ({"milliseconds": np.full((2, 2, 2), np.nan)}, "expected positive times"),
        ({"milliseconds": np.geomspace(1e-4, 1e4, 8).reshape(2, 2, 2)}, "within a factor of"),
        ({"milliseconds": CELLS * np.array([1.0, 0.79])[:, None, None] ** 9}, "faster than less work"),
        # Small falls do not add up to a large one.
        (
            {
                "milliseconds": np.array([10.0, 9.0, 7.9, 7.0]).reshape(4, 1, 1),
                "requests": np.array([1, 2, 4, 8]),
                "tokens_per_request": np.array([1]),
                "context": np.array([1]),
            },
            "4 requests x 1 tokens at context 1 take 7.9 ms, more than 20% faster than less work, 10 ms",
        ),
    ],
)
def test_what_cannot_be_true_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        make(**changed)


def test_more_work_may_be_a_fifth_faster_and_is_then_as_slow():
    cells = np.array([[[10.0], [8.1]], [[10.0], [10.0]]])
    assert np.all(make(milliseconds=cells, context=np.array([1])).milliseconds == 10.0)


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "no such file; measure it again with sam profile"),
        ("{}", "not a step-cost table"),
        ("nonsense", "not JSON"),
        (json.dumps({"requests": [], "tokens_per_request": [1], "context": [1], "milliseconds": [],
                     "fingerprint": {}, "source": ""}), "expected integers from 1"),
    ],
)  # fmt: skip
def test_files_that_are_no_tables(tmp_path, content, message):
    path = tmp_path / "cost.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        StepCost.load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
