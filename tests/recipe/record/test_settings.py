"""Settings that have changed when a run is resumed."""

import pytest
from omegaconf import OmegaConf

from recipe.launch.config import compose_config
from recipe.record import changes, keep


def compose(*overrides):
    return compose_config("dapo_tiny_cpu", list(overrides))


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    directory = tmp_path_factory.mktemp("run")
    keep(directory, compose(), None)
    return directory


CURVE = {
    "actor_rollout_ref.actor.optim.lr=1e-3": "actor_rollout_ref.actor.optim.lr 0.0002 -> 0.001",
    "seed=7": "seed 0 -> 7",
    "data.train_files=/elsewhere": "data.train_files outputs/tiny_assets/train.parquet -> /elsewhere",
    "actor_rollout_ref.rollout.temperature=0.7": "actor_rollout_ref.rollout.temperature 1.0 -> 0.7",
    "speculation.verification=rejection": "speculation.verification exact -> rejection",
    "algorithm.filter_groups.enable=false": "algorithm.filter_groups.enable True -> False",
    "data.train_batch_size=4": "data.train_batch_size 8 -> 4",
}
OTHERS = {
    "speculation=off": "speculation.method sam -> off",
    "trainer.save_freq=1": "trainer.save_freq 5 -> 1",
    "trainer.total_training_steps=20": "trainer.total_training_steps 10 -> 20",
    "trainer.logger=[console]": "trainer.logger ['console', 'wandb'] -> ['console']",
    "actor_rollout_ref.rollout.max_num_seqs=64": "actor_rollout_ref.rollout.max_num_seqs 128 -> 64",
}


def test_what_has_not_changed_is_not_listed(before):
    assert changes(before, compose()) == ([], [])


def test_what_makes_another_curve_is_listed_and_what_does_not_apart(before):
    curve, _ = changes(before, compose(*CURVE))
    assert set(CURVE.values()) <= set(curve)
    curve, others = changes(before, compose(*OTHERS))
    assert curve == [] and set(OTHERS.values()) <= set(others)


def test_another_end_bends_a_schedule(before):
    schedule = "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"
    curve, _ = changes(before, compose(schedule, "trainer.total_training_steps=20"))
    assert "trainer.total_training_steps 10 -> 20" in curve


def test_a_config_that_cannot_be_read_is_one_line(tmp_path):
    now = compose()
    for content in (None, "a: [", "- a"):
        if content is not None:
            (tmp_path / "config.yaml").write_text(content)
        with pytest.raises(ValueError, match="config.yaml cannot be read .*: what settings the run had is not known"):
            changes(tmp_path, now)


def test_the_old_config_is_kept(tmp_path):
    configs = [OmegaConf.create({"seed": seed}) for seed in range(3)]
    for until, config in ((None, configs[0]), (3, configs[0]), (3, configs[1]), (3, configs[2])):
        keep(tmp_path, config, until)
    kept = {path.name: OmegaConf.load(path).seed for path in tmp_path.iterdir()}
    assert kept == {"config.yaml": 2, "config.until_step_3.yaml": 0, "config.until_step_3.2.yaml": 1}
