"""Turns, and what is kept of rounds on disk."""

import json

import pytest

from sam.bench import rounds as module
from sam.bench.loads import Group
from sam.bench.rounds import RoundsFile, joined, measure, missing, turns
from tests.sam.bench.test_settings import settings


class Engine:
    """Notes what it is asked."""

    def __init__(self, variant, log):
        self.variant, self.log, self.start_s = variant, log, 2.5

    def has_workers(self):
        return self.variant == "sam"

    def ask(self, command):
        self.log.append((self.variant, len(command["run"]), [row["seed"] for row in command["run"]]))
        return {"seconds": 1.0} | ({"recorded": {"ends": [1.0]}} if command["record"] else {})


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "REST_SECONDS", 0.0)
    return tmp_path / "rounds.jsonl"


def run(file, rounds):
    log, said = [], []
    engines = {variant: Engine(variant, log) for variant in settings().variants}
    measure(engines, settings(), [Group([1]), Group([2]), Group([3])], file, rounds, said.append)
    assert len(said) == runs_of(log)
    return log


def runs_of(log):
    """Number of runs; four batches of one request are one, but for the warm-up's."""
    ones = sum(requests == 1 for _, requests, _ in log)
    return len(log) - ones + (3 + (ones - 3) // 4 if ones else 0)


def test_variants_take_turns_and_are_warmed_up(path):
    file = RoundsFile(path, settings(), resume=False)
    log = run(file, 2)
    order = [(variant, requests) for variant, requests, _ in log]
    one = [("stock", 1), ("off", 1), ("sam", 1)]
    eight = [("stock", 8), ("off", 8), ("sam", 8)]
    batches = [[place] * 4 for place in one]  # of one request, one after another
    first, second = sum(batches, []), sum(batches[1:] + batches[:1], [])
    assert order == [*one, *eight, *first, *eight, *second, *eight[1:], eight[0]]
    assert [line["requests"] for line in file.lines] == [1, 8, 1, 8]
    assert file.lines[0]["runs"]["sam"] == {"seconds": 4.0, "batch_seconds": [1.0] * 4, "start_s": 2.5}
    assert file.lines[1]["runs"]["sam"] == {"seconds": 1.0, "batch_seconds": [1.0], "start_s": 2.5}
    assert file.recorded(1, "sam") == [{"ends": [1.0]}] * 4 and file.recorded(8, "sam") == [{"ends": [1.0]}]


def test_batches_make_one_run():
    one = {
        "seconds": 1.25, "steps": 10, "tokens": 30, "responses": ["a", "b"], "as_recorded": 2, "asynchronous": True,
        "memory_mib": 90.0, "drafted": 5, "forward_ms": 7.5, "replays": {"with_drafts": [1, 2]},
        "recorded": {"ends": []},
    }  # fmt: skip
    other = one | {"seconds": 2.5, "responses": ["a", "c"], "memory_mib": 80.0, "replays": {"with_drafts": [3, 4]}}
    assert joined([one, other]) == {
        "seconds": 3.75, "steps": 20, "tokens": 60, "responses": ["a", "b", "a", "c"], "as_recorded": 4,
        "asynchronous": True, "memory_mib": 90.0, "drafted": 10, "forward_ms": 15.0, "replays": {"with_drafts": (4, 6)},
        "recorded": [{"ends": []}] * 2, "batch_seconds": [1.25, 2.5],
    }  # fmt: skip
    untold = {"as_recorded": None, "drafted": None, "forward_ms": None, "replays": None}
    assert joined([one | untold, other | untold]).items() >= untold.items()


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
    by_variant = {name: [rest for variant, *rest in log if variant == name] for name in settings().variants}
    assert by_variant["stock"] == by_variant["off"] == by_variant["sam"]
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
    with pytest.raises(ValueError, match="line 1: expected a JSON object, got .1."):
        RoundsFile(path, settings(), resume=True)


def test_each_variant_comes_first_in_turn():
    assert [turns(["a", "b", "c"], round_)[0] for round_ in (1, 2, 3, 4)] == ["a", "b", "c", "a"]
