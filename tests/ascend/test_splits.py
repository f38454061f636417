"""Responses that are cut anywhere and go on as new requests, on the real, patched vllm-ascend: the same tokens."""

import pytest

from tests.ascend.engines import assert_same, generate_all

pytestmark = pytest.mark.engine

DRAWN = {"temperature": 0.4, "responses": 100}
PARTS = DRAWN | {"parts": 5}
SYNCHRONOUS = {"whole": DRAWN, "off": PARTS | {"async_scheduling": False}, "sam": PARTS | {"method": "sam"}}
ASYNCHRONOUS = {
    "async off": PARTS | {"async_scheduling": True},
    "async sam": PARTS | {"method": "sam async"},
    "async sam FULL": PARTS | {"method": "sam async", "graph": "FULL"},
}


@pytest.fixture(scope="module")
def results(models):
    return generate_all([(models / "dense", part) for part in (SYNCHRONOUS, ASYNCHRONOUS)])


@pytest.mark.parametrize("name", ["off", "sam", *ASYNCHRONOUS])
def test_parts_have_the_tokens_of_the_whole(results, name):
    assert_same(results, name, "whole", 1e-4)
    assert results[name]["status"]["asynchronous"] == name.startswith("async")
    if "sam" in name:
        assert results[name]["accepted"] > 100 and results[name]["status"]["counters"]["draft_errors"] == 0
