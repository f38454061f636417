"""The load bench: what it refuses, what it would notice, and a small load on real Ray."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sam.sharing import played_engines
from sam.sharing.__main__ import main
from sam.sharing.client import Client
from sam.sharing.played_engines import Load, Part, PlayedEngine, tokens_of
from sam.sharing.shard import Cluster
from tests.sam.sharing.channel import RUN, Channel, Clock, make_groups

ROOT = Path(__file__).parents[3]
LOAD = Load(engines=2, requests=3, tokens_per_second=10, group_size=2, seconds=1, interval_ms=20)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shards", "0"], "error: --shards 0: expected 1 to 64"),
        (["--engines", "0"], "error: --engines 0: expected 1 or more"),
        (["--tokens-per-second", "-1"], "error: --tokens-per-second -1: expected 1 or more"),
        (["--group-size", "7"], "error: --group-size 7: expected a divisor of the 4096 requests"),
        (["--engines", "2", "--machines", "3"], "error: --machines 3: expected at most the 2 engines"),
    ],
)
def test_a_load_that_cannot_be_played_is_refused_in_one_line(arguments, said, capsys):
    assert main(["bench", *arguments]) == 2
    assert capsys.readouterr().err.strip() == said


@pytest.fixture
def engines(monkeypatch):
    """Two engines at one shard in this process, without threads."""
    channel = Channel([make_groups()], Clock())
    monkeypatch.setattr(played_engines, "CountingTransport", lambda cluster, machine, counts: channel)
    monkeypatch.setattr(Client, "start", lambda self: None)
    times = np.zeros((LOAD.engines, LOAD.steps))
    part = Part(LOAD, Cluster("no address", RUN, 1), 0, 1, "no file")
    return [PlayedEngine(part, number, times) for number in range(LOAD.engines)]


def play(engines, steps):
    for _ in range(steps):
        for engine in engines:
            engine.append_step()
        for engine in 2 * engines:
            engine.client.exchange()


def test_all_text_is_compared_and_none_is_missing(engines):
    play(engines, LOAD.steps)
    for engine in engines:
        engine.compare()
        assert (engine.wrong, engine.missing(), engine.num_taken) == (0, 0, LOAD.requests * LOAD.steps)
        assert engine.latencies.sum() == LOAD.requests * LOAD.steps


def test_text_that_is_lost_or_changed_is_noticed(engines):
    play(engines, LOAD.steps - 1)
    first, second = engines
    first.compare()
    assert (first.wrong, first.missing()) == (0, LOAD.requests)
    part, now = second._arrived[3]
    second._arrived[3] = part._replace(tokens=part.tokens + 1), now
    second.compare()
    assert second.wrong == len(part.tokens)


def test_tokens_say_whose_and_where_they_are():
    requests, positions = np.meshgrid(np.arange(300), np.arange(1, 300))
    tokens = tokens_of(0, requests, positions)
    assert tokens.min() >= 0 and len(np.unique(tokens)) > 0.999 * tokens.size
    assert tokens_of(0, np.arange(5), np.zeros(5, int)).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.engine
def test_a_small_load_on_ray_is_delivered():
    arguments = "--engines 4 --requests 4 --group-size 4 --tokens-per-second 20 --seconds 1 --machines 1"
    command = [sys.executable, "-m", "sam.sharing", "bench", *arguments.split()]
    said = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=True).stdout
    assert "delivered:         960 tokens, 0 missing, 0 wrong, 0 errors" in said and "p99" in said
