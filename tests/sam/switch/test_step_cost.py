"""Step-cost tables: looked up between and beyond their points, and refused where they cannot be true."""

import doctest
import json

import numpy as np
import pytest

from sam.switch import step_cost
from sam.switch.step_cost import StepCost


def test_examples_run():
    failed, attempted = doctest.testmod(step_cost)
    assert attempted and not failed


def make(**changed):
    cells = np.array([[[10.0, 20.0], [12.0, 26.0]], [[14.0, 28.0], [30.0, 60.0]]])
    arguments = {
        "requests": np.array([1, 9]),
        "tokens_per_request": np.array([1, 3]),
        "context": np.array([100, 200]),
        "milliseconds": cells,
        "fingerprint": {"model": "tiny", "device": "cpu"},
        "source": "a test",
    }
    return StepCost(**{**arguments, **changed})


@pytest.mark.parametrize(
    "requests, rows, context, expected",
    [
        (1, 1, 100, 10.0),
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


def by_numpy(table, requests, num_tokens, context):
    """Axis by axis, as numpy interpolates."""
    per_request, last = num_tokens / requests, table.tokens_per_request[-1]
    by_context = [[np.interp(context, table.context, cells) for cells in row] for row in table.milliseconds]
    line = [np.interp(requests, table.requests, column) for column in zip(*by_context, strict=True)]
    slope = (line[-1] - line[-2]) / (last - table.tokens_per_request[-2])
    beyond = slope * max(0.0, per_request - last)
    return (np.interp(per_request, table.tokens_per_request, line) + beyond) * max(1.0, requests / table.requests[-1])


def test_values_between_all_points():
    chance = np.random.default_rng(0)
    cells = np.sort(np.sort(np.sort(chance.uniform(5, 9, (4, 3, 3)), 0), 1), 2)
    table = StepCost(np.array([1, 3, 8, 40]), np.array([1, 2, 6]), np.array([16, 256, 4096]), cells)
    for _ in range(300):
        requests, context = int(chance.integers(1, 60)), float(chance.uniform(0, 6000))
        num_tokens = requests + int(chance.integers(0, 8 * requests))
        expected = by_numpy(table, requests, num_tokens, context)
        assert table.step_ms(requests, num_tokens, context)[0] == pytest.approx(expected)


def test_saved_and_loaded(tmp_path):
    make().save(tmp_path / "cost.json")
    loaded = StepCost.load(tmp_path / "cost.json")
    assert np.array_equal(loaded.milliseconds, make().milliseconds)
    assert (loaded.fingerprint, loaded.source) == (make().fingerprint, "a test")
    loaded.check_fingerprint({"model": "tiny", "tensor_parallel_size": 2})
    with pytest.raises(ValueError, match="is of device=cpu, this engine has device=A3"):
        loaded.check_fingerprint({"model": "tiny", "device": "A3"})


@pytest.mark.parametrize("faster, refused", [(0.15, False), (0.19, False), (0.21, True), (0.3, True), (0.5, True)])
@pytest.mark.parametrize("axis", ["requests", "tokens_per_request"])
def test_more_work_may_be_a_fifth_faster_at_most(faster, refused, axis):
    cells = np.array([[[10.0], [10.0 * (1 - faster)]], [[10.0], [10.0]]])
    cells = cells.swapaxes(0, 1) if axis == "requests" else cells
    if refused:
        with pytest.raises(ValueError, match="more than 20% faster than less work .*: 10 ms"):
            make(milliseconds=cells, context=np.array([1]))
    else:
        assert np.all(make(milliseconds=cells, context=np.array([1])).milliseconds == 10.0)


def test_small_falls_do_not_add_up_to_a_large_one():
    axes = {"requests": np.array([1, 2, 4, 8]), "tokens_per_request": np.array([1]), "context": np.array([1])}
    make(milliseconds=np.array([10.0, 9.0, 8.1, 8.0]).reshape(4, 1, 1), **axes)
    with pytest.raises(ValueError, match=r"4 requests x 1 tokens take 7.9 ms .* less work \(1 requests x 1 tokens"):
        make(milliseconds=np.array([10.0, 9.0, 7.9, 7.0]).reshape(4, 1, 1), **axes)


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"requests": np.array([], int)}, "requests is empty"),
        ({"requests": np.array([4, 2])}, r"requests=\[4, 2\]: expected rising"),
        ({"context": np.array([0, 5])}, r"context=\[0, 5\]: expected rising integers from 1"),
        ({"tokens_per_request": np.array([2, 3])}, "expected to begin with 1"),
        ({"milliseconds": np.ones((2, 2, 1))}, r"shape \[2, 2, 1\]: the axes ask for \[2, 2, 2\]"),
        ({"milliseconds": np.zeros((2, 2, 2))}, "expected positive times"),
        ({"milliseconds": np.full((2, 2, 2), np.nan)}, "expected positive times"),
        ({"milliseconds": np.geomspace(1e-4, 1e4, 8).reshape(2, 2, 2)}, "within a factor of"),
        ({"milliseconds": 9.0 - np.arange(8.0).reshape(2, 2, 2)}, "faster than less work"),
    ],
)
def test_what_cannot_be_true_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        make(**changed)


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "no such file; measure it again with sam profile"),
        ("{}", "not a step-cost table"),
        ("nonsense", "not JSON"),
        (json.dumps({"requests": [], "tokens_per_request": [1], "context": [1], "milliseconds": [],
                     "fingerprint": {}, "source": ""}), "requests is empty"),
    ],
)  # fmt: skip
def test_files_that_are_no_tables(tmp_path, content, message):
    path = tmp_path / "cost.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        StepCost.load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
