"""AscendStoreConnector of the real vllm-ascend: by its own code, what its keys are made of and what its reset does."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("pool_keys.py")


@pytest.fixture(scope="module")
def found():
    paths = os.pathsep.join([str(SCRIPT.parent), str(SCRIPT.parents[2])])
    command = [sys.executable, str(SCRIPT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_its_keys_bear_the_salt(found):
    old, new = found["keys"]["run/1"], found["keys"]["run/2"]
    assert len(old) == 4 and old == found["again"] and not set(old) & set(new)
    assert found["asked"]["run/1"] == old and found["asked"]["run/2"] == new


def test_its_reset_is_vllms_base_class_which_clears_nothing(found):
    assert not found["resets"]


def test_draft_tokens_that_it_counts_get_no_key(found):
    """It counts the draft tokens of a step as tokens; keys are of blocks whose tokens are all in the response."""
    assert len(found["drafted"]) == 5 and found["drafted"][:4] == found["known"]


def test_a_part_of_a_block_gets_the_whole_blocks_key(found):
    """With discard_partial_chunks=false, which preflight refuses: 6 tokens of a prompt that goes on are computed."""
    assert [tokens for _, tokens in found["partial"]] == [4, 2]
    assert found["partial"][1][0] == found["keys"]["run/1"][1]
