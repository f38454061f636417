"""Further paths as rows of the batch on the real, patched vllm-ascend: the same tokens, whatever is verified."""

import pytest

from tests.ascend.engines import assert_same, generate_all

pytestmark = pytest.mark.engine

ROOM = {"batch": 32, "temperature": 0.4}  # free rows beside 14 requests
PATHS = ROOM | {"method": "sam", "paths": 3}
ASYNC = PATHS | {"method": "sam async"}
LONG = {"workload": "long", "blocks": 10}

DENSE = {
    "off": ROOM,
    "sync": PATHS,
    "async": ASYNC,
    "sync FULL": PATHS | {"graph": "FULL"},
    "async FULL": ASYNC | {"graph": "FULL"},
    "sync DECODE": PATHS | {"graph": "FULL_DECODE_ONLY"},
    "long off": ROOM | {"workload": "long"},
    "sync preempted": PATHS | LONG,
    "async preempted": ASYNC | LONG,
}
RANKS = {"sync ranks": PATHS | {"tensor_parallel": 2}, "async ranks": ASYNC | {"tensor_parallel": 2}}
EXPERTS = {"moe off": ROOM, "sync moe": PATHS, "async moe": ASYNC}
WITH_PATHS = [name for part in (DENSE, RANKS, EXPERTS) for name, one in part.items() if "paths" in one]


@pytest.fixture(scope="module")
def results(models):
    return generate_all([(models / "dense", DENSE), (models / "dense", RANKS), (models / "experts", EXPERTS)])


@pytest.mark.parametrize("name", WITH_PATHS)
def test_the_same_tokens(results, name):
    off = "moe off" if "moe" in name else "long off" if "preempted" in name else "off"
    # Two ranks add their halves up in another order than one rank its whole.
    assert_same(results, name, off, 1e-4 if "ranks" in name else 0.0)


@pytest.mark.parametrize("name", WITH_PATHS)
def test_rows_were_verified_and_followed_without_a_fault(results, name):
    if "ranks" in name:
        assert results[name]["accepted"] > 5
        return
    counters = results[name]["status"]["counters"]
    assert counters["draft_errors"] == counters["path_errors"] == 0
    assert counters["path_rows"] > 30 and counters["path_wins"] > 2
