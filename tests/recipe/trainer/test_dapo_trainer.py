"""What the trainer does around verl's, without Ray."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from sam_recipe.trainer import dapo_trainer as module
from sam_recipe.trainer.dapo_trainer import DapoTrainer


class Calls:
    """Stands for a server's or the record's methods: notes what is called."""

    def __init__(self, seen):
        self._seen = seen

    def __getattr__(self, name):
        def call(*_):
            self._seen.append(name)

        call.remote = call
        return call


@pytest.mark.parametrize("own", [True, False])
def test_a_users_sampler_decides_itself_how_many_prompts_a_step_begins_with(monkeypatch, own):
    """It need not know of rounds; without them there is no record of a step's responses."""
    asked, written = [], []
    monkeypatch.setattr(module.PPOTrainerSync, "_add_batch_to_generate", lambda _: asked.append("verl's"))
    monkeypatch.setattr(module.PPOTrainerSync, "on_sample_end", lambda _: None)
    trainer = object.__new__(DapoTrainer)
    trainer.replay_buffer = object.__new__(module.DapoRounds) if own else object()
    if own:
        trainer.replay_buffer.enabled, trainer.replay_buffer.round_size = True, 6
        trainer.replay_buffer.last_step = SimpleNamespace(rounds=2, rows=lambda seed, step: [])
    settings = {"data": {"train_batch_size": 4}, "speculation": {"batch_size_threshold": 8}}
    settings["actor_rollout_ref"] = {"rollout": {"seed": 0}}
    trainer.config, trainer._is_routed = OmegaConf.create(settings), False
    trainer._add_prompts_to_generate = asked.append
    trainer.global_steps, trainer.record = 1, Calls(written)
    written_steps = SimpleNamespace(save=lambda directory, step: written.append("engine steps"))
    trainer._collect_rollout = lambda: ([written_steps], [1.0])
    metrics = lambda replicas, seconds, threshold, rounds: {"rollout/rounds": rounds}  # noqa: E731
    monkeypatch.setattr(module, "rollout_metrics", metrics)
    trainer._add_batch_to_generate()
    trainer.on_sample_end()
    assert asked == [6 if own else "verl's"]
    assert written == ["write_rollouts"] * own + ["engine steps"]
    assert trainer._rollout_metrics == {"rollout/rounds": 2 if own else 1}
