"""On the same text as many drafts are accepted as with the first model runner."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What tests.v2.forced writes, by runner."""
    folder = tmp_path_factory.mktemp("forced")
    for runner in ("first", "second"):
        command = [sys.executable, "-m", "tests.v2.forced", runner, str(folder / runner)]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return {runner: json.loads((folder / runner).read_text()) for runner in ("first", "second")}


@pytest.mark.parametrize("way", ["synchronous", "asynchronous"])
def test_acceptance_length_is_the_first_runners(found, way):
    """Mean tokens of a step in which a request verified drafts: within 2 %."""
    lengths = {}
    for runner, ways in found.items():
        counts = ways[way]
        assert counts["verify_steps"] > 150 and counts["accepted"] > 150
        lengths[runner] = counts["verified_tokens"] / counts["verify_steps"]
    assert lengths["second"] == pytest.approx(lengths["first"], rel=0.02)
