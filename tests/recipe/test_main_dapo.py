"""When a run is over already."""

import json

import pytest
from omegaconf import OmegaConf

from recipe.launch import run_lock
from recipe.main_dapo import is_finished, main
from recipe.preflight import checks


def config(directory, steps=10, mode="auto"):
    return OmegaConf.create(
        {"run_dir": str(directory), "trainer": {"total_training_steps": steps, "resume_mode": mode}}
    )


def leave(directory, phase, checkpoint):
    (directory / "checkpoints").mkdir(exist_ok=True)
    (directory / "checkpoints" / "latest_checkpointed_iteration.txt").write_text(str(checkpoint))
    (directory / "state.json").write_text(json.dumps({"phase": phase}))


@pytest.mark.parametrize(
    "phase, checkpoint, finished", [("finished", 10, True), ("running", 10, False), ("finished", 5, False)]
)
def test_finished_means_ended_with_its_last_checkpoint(tmp_path, phase, checkpoint, finished):
    leave(tmp_path, phase, checkpoint)
    assert is_finished(config(tmp_path)) is finished


def test_nothing_there_is_not_finished(tmp_path):
    assert not is_finished(config(tmp_path))


def test_a_run_that_does_not_resume_is_never_finished(tmp_path):
    leave(tmp_path, "finished", 10)
    assert not is_finished(config(tmp_path, mode="disable"))
    assert not is_finished(config(tmp_path, steps=20))


def test_mistakes_end_with_one_line(capsys):
    assert main(["--config-name", "dapo_tiny_cpu", "speculation=sma"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_a_second_run_in_the_same_directory_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checks, "check", lambda *_, **__: None)
    with run_lock.lock(tmp_path / "run"):
        assert main(["--config-name", "dapo_tiny_cpu", f"run_dir={tmp_path / 'run'}"]) == 2
    assert "is used by a run that goes on" in capsys.readouterr().err
    assert not (tmp_path / "run" / "config.yaml").exists()
