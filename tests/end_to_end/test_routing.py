"""The recipe's router and client before two real engines: the tokens of verl's balancer, in chunks and with drafts."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.e2e


def test_tokens_are_those_of_verls_balancer(assets):
    command = [
        *(sys.executable, "-m", "recipe.routing_bench", "--identity", "--json", "--assets", str(assets)),
        *("--engines", "off", "sam", "--chunk", "16", "48", "--groups", "2", "--samples", "4", "--slots", "3"),
        *("--mean", "40", "--cap", "160"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), timeout=600)
    assert ended.returncode == 0, ended.stderr[-3000:]
    rows = json.loads(ended.stdout.splitlines()[-1])["rows"]
    cells = {(row["router"], row["chunk"], row["replicas"], row["engines"]) for row in rows}
    ways = [("verl", None), ("context", None), ("context", 16), ("context", 48)]
    assert cells == {(*way, replicas, engines) for way in ways for replicas in (1, 2) for engines in ("off", "sam")}
    assert all(row["equal"] == row["responses"] == 8 for row in rows)
