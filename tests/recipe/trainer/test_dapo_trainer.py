"""What the trainer does around verl's: the end of a run, without Ray."""

import pytest

from recipe.trainer import dapo_trainer as module
from recipe.trainer.dapo_trainer import DapoTrainer


class Calls:
    """Stands for a server's or the record's methods: notes what is called."""

    def __init__(self, seen):
        self._seen = seen

    def __getattr__(self, name):
        def call(*_):
            self._seen.append(name)

        call.remote = call
        return call


@pytest.fixture
def seen(monkeypatch):
    """Names of what is called, in order."""
    names = []
    monkeypatch.setattr(module.PPOTrainerSync, "fit", lambda *_: names.append("fit"))
    monkeypatch.setattr(module.ray, "get", lambda answers, timeout: names.append(len(answers)))
    return names


def make_trainer(seen, shards):
    trainer = object.__new__(DapoTrainer)
    trainer.record, trainer.global_steps, trainer._shards = Calls(seen), 0, shards
    trainer._servers = lambda: [Calls(seen)] * 2
    return trainer


def test_the_engines_stop_sharing_before_the_shards_end(seen):
    make_trainer(seen, ["a shard"]).fit(None)
    assert seen == ["start", "fit", "finish", "stop_sharing", "stop_sharing", 2]


def test_an_engine_that_does_not_answer_is_no_failure_of_a_run_that_has_finished(seen, monkeypatch):
    def fail(*_, **__):
        raise TimeoutError

    monkeypatch.setattr(module.ray, "get", fail)
    make_trainer(seen, ["a shard"]).fit(None)
    assert seen[:3] == ["start", "fit", "finish"]


def test_a_run_that_does_not_share_asks_for_nothing(seen):
    make_trainer(seen, []).fit(None)
    assert seen == ["start", "fit", "finish"]
