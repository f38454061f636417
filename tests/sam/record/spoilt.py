"""Spoils files: bytes cut off, put in and replaced; values in them replaced by other kinds, or taken out."""

import copy
from contextlib import contextmanager

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from sam.reading import ReadError

EACH = settings(
    max_examples=2000,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
SPOILT = st.sampled_from(
    [None, True, -1, 0, 1, 2.0, 0.5, 2**31 - 1, 2**31, 2**40, -(2**70), float("nan"), float("inf"), "", "x\u2028y",
     "\ud800", "\n", [], [1], [[1]], [None], {}, {"a": 1}, "1.3 MB"]
)  # fmt: skip
CUTS = st.tuples(st.sampled_from(["cut", "insert", "replace", "double"]), st.integers(0, 2**16), st.binary(max_size=4))


def spoil_bytes(content: bytes, cuts: list[tuple[str, int, bytes]]) -> bytes:
    """Content with bytes cut off, put in, replaced, or a stretch of it twice."""
    for how, place, more in cuts:
        at = place % (len(content) + 1)
        content = {
            "cut": content[:at],
            "insert": content[:at] + more + content[at:],
            "replace": content[:at] + more + content[at + len(more) :],
            "double": content[:at] + content[at // 2 :],
        }[how]
    return content


def spoil_value(value, path: list[int], new):
    """A copy of nested lists and objects with the value at some place replaced, or taken out."""
    value = at = copy.deepcopy(value)
    for number in path:
        keys = list(at) if isinstance(at, dict) else range(len(at))
        if not keys:
            break
        key = keys[number % len(keys)]
        if number == path[-1] or not isinstance(at[key], dict | list):
            if new is ...:
                del at[key]
            else:
                at[key] = new
            break
        at = at[key]
    return value


PATHS = st.lists(st.integers(0, 50), min_size=1, max_size=4)
VALUES = st.one_of(SPOILT, st.just(...))


@contextmanager
def one_line(*places):
    """A ReadError may come, and is one line that names one of the places."""
    try:
        yield
    except ReadError as error:
        assert "\n" not in str(error) and any(str(place) in str(error) for place in places)
