"""Turns, and what is kept of rounds on disk."""

import json

import pytest

from sam.bench import rounds as module
from sam.bench.loads import Group
from sam.bench.rounds import RoundsFile, measure, missing, turns
from tests.sam.bench.test_settings import settings


class Engine:
    """Notes what it is asked."""

    def __init__(self, variant, log):
        self.variant, self.log, self.start_s = variant, log, 2.5

    def has_workers(self):
        return self.variant == "sam"

    def ask(self, command):
        self.log.append((self.variant, len(command["run"]), [row["seed"] for row in command["run"]]))
        return {"seconds": 1.0}


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "REST_SECONDS", 0.0)
    return tmp_path / "rounds.jsonl"


def run(file, rounds):
    log, said = [], []
    engines = {variant: Engine(variant, log) for variant in settings().variants}
    measure(engines, settings(), [Group([1]), Group([2]), Group([3])], file, rounds, said.append)
    assert len(said) == len(log)
    return log


def test_variants_take_turns_and_are_warmed_up(path):
    file = RoundsFile(path, settings(), resume=False)
    log = run(file, 2)
    order = [(variant, requests) for variant, requests, _ in log]
    one = [("stock", 1), ("off", 1), ("sam", 1)]
    eight = [("stock", 8), ("off", 8), ("sam", 8)]
    assert order == [*one, *eight, *one, *eight, *one[1:], one[0], *eight[1:], eight[0]]
    assert [line["requests"] for line in file.lines] == [1, 8, 1, 8]
    assert file.lines[0]["runs"]["sam"] == {"seconds": 1.0, "start_s": 2.5}


def test_there_is_a_rest_between_runs_where_an_engine_has_workers(path, monkeypatch):
    rests = []
    monkeypatch.setattr(module, "REST_SECONDS", 1.5)
    monkeypatch.setattr(module.time, "sleep", rests.append)
    run(RoundsFile(path, settings(), resume=False), 1)
    monkeypatch.setattr(Engine, "has_workers", lambda self: False)
    path.unlink()
    run(RoundsFile(path, settings(), resume=False), 1)
    assert rests == [1.5] * 12 + [0.0] * 12


def test_all_variants_get_the_same_requests_in_a_round(path):
    log = run(RoundsFile(path, settings(), resume=False), 2)
    for first in range(0, len(log), 3):
        assert log[first][1:] == log[first + 1][1:] == log[first + 2][1:]
    assert len({tuple(seeds) for _, _, seeds in log}) == len(log) // 3


def test_resumed_it_measures_what_is_missing(path):
    whole = RoundsFile(path, settings(), resume=False)
    run(whole, 1)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-1]) + lines[-1][:20])  # killed while it wrote
    file = RoundsFile(path, settings(), resume=True)
    assert missing(file, settings(), 2) == [(1, 1), (2, 0), (2, 1)]
    assert [(variant, requests) for variant, requests, _ in run(file, 1)] == [
        *[("stock", 8), ("off", 8), ("sam", 8)] * 2  # warm-up, and the round
    ]
    again = RoundsFile(path, settings(), resume=True)
    assert again.lines == whole.lines
    assert run(again, 1) == []


def test_settings_must_be_the_same(path):
    run(RoundsFile(path, settings(), resume=False), 1)
    with pytest.raises(ValueError, match="samples was 4, now 2: use the same settings"):
        RoundsFile(path, settings(samples=2), resume=True)
    with pytest.raises(ValueError, match="is there already: go on with --resume"):
        RoundsFile(path, settings(), resume=False)


def test_a_file_without_rounds_is_no_measurement(path):
    RoundsFile(path, settings(samples=2), resume=False)
    RoundsFile(path, settings(), resume=False)
    assert json.loads(path.read_text())["settings"]["samples"] == 4


def test_another_file_is_refused(path):
    path.write_text("[1]\n[2]\n")
    with pytest.raises(ValueError, match="not rounds of sam.bench"):
        RoundsFile(path, settings(), resume=True)


def test_each_variant_comes_first_in_turn():
    assert [turns(["a", "b", "c"], round_)[0] for round_ in (1, 2, 3, 4)] == ["a", "b", "c", "a"]
