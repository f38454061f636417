"""What a start says and does before and after its training: refused, resumed, over already."""

import json

import pytest
from omegaconf import OmegaConf

from sam_recipe import preflight
from sam_recipe.launch import supervisor
from sam_recipe.launch.ending import Ending
from sam_recipe.main_dapo import is_finished, main
from tests.recipe.launch.test_ending import MODEL, TRACKER, checkpoint, cut


@pytest.mark.parametrize(
    ("phase", "saved", "steps", "mode", "finished"),
    [
        ("finished", 10, 10, "auto", True),
        ("running", 10, 10, "auto", False),
        ("finished", 5, 10, "auto", False),
        ("finished", 10, 10, "disable", False),
        ("finished", 10, 20, "auto", False),
        ("finished", None, 10, "auto", False),
    ],
)
def test_finished_means_ended_with_its_last_checkpoint(tmp_path, phase, saved, steps, mode, finished):
    (tmp_path / "state.json").write_text(json.dumps({"phase": phase}))
    if saved:
        checkpoint(tmp_path, saved)
    trainer = {"total_training_steps": steps, "resume_mode": mode}
    assert is_finished(OmegaConf.create({"run_dir": str(tmp_path), "trainer": trainer})) is finished


RUN = ("--config-name", "dapo_tiny_cpu", "run_dir=run")  # the same words in every test: they are composed once


@pytest.fixture
def start(tmp_path, monkeypatch, capsys):
    """Starts a run whose training is over at once; returns the exit code and what the screen said before it."""
    monkeypatch.setattr(preflight, "check", lambda *_, **__: None)
    monkeypatch.chdir(tmp_path)
    run_directory, endings = tmp_path / "run", []
    (run_directory / "checkpoints").mkdir(parents=True)

    def supervise(command, *_, **__):
        return endings.pop(0) if endings else Ending(0)

    def start(*overrides, ends=()):
        endings[:] = ends
        monkeypatch.setattr(supervisor, "guard", lambda _, work: work())
        monkeypatch.setattr(supervisor, "supervise", supervise)
        code = main([*RUN, *overrides])
        return code, [line for line in capsys.readouterr().err.splitlines() if not line.startswith("starting")]

    start.directory = run_directory
    return start


def test_a_second_run_in_the_same_directory_is_refused(start):
    with supervisor.lock(start.directory):
        code, (said,) = start()
    assert code == 2 and "is used by a run that goes on" in said
    assert not (start.directory / "config.yaml").exists()


def test_a_resumed_run_says_where_it_goes_on(start):
    assert not any(line.startswith("resumed") for line in start()[1])
    checkpoint(start.directory, 3)
    said = start()[1]
    assert said[0] == f"resumed from step 3 of {start.directory}"
    assert said[0] in (start.directory / "train.log").read_text()


def test_changed_settings_are_refused_or_listed_and_the_old_ones_kept(start):
    start()
    checkpoint(start.directory, 3)
    rate = "actor_rollout_ref.actor.optim.lr=1e-3"
    config = (start.directory / "config.yaml").read_text()
    code, (said,) = start(rate, "trainer.save_freq=1")
    assert code == 2 and f"goes on from step 3, changed: {rate.partition('=')[0]} 0.0002 -> 0.001: it would" in said
    assert said.endswith("choose another run_dir=, or add --accept-changes [run_dir.changed]")
    assert (start.directory / "config.yaml").read_text() == config
    code, said = start(rate, "trainer.save_freq=1", "--accept-changes")
    assert code == 0 and said[0].startswith("resumed from step 3")
    assert said[1] == f"changed since then: {rate.partition('=')[0]} 0.0002 -> 0.001, trainer.save_freq 5 -> 1"
    assert (start.directory / "config.until_step_3.yaml").read_text() == config
    assert start("trainer.save_freq=7", rate)[1][1] == "changed since then: trainer.save_freq 1 -> 7"


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_gone_on_from(start):
    start()
    checkpoint(start.directory, 3)
    newest = checkpoint(start.directory, 6)
    unread = Ending(1, f"{newest} cannot be read (EOFError)", unreadable=newest)
    code, said = start(ends=[unread])  # which only its reader finds out
    assert code == 0 and said[0] == f"resumed from step 6 of {start.directory}"
    assert f"warning: {newest} cannot be read (EOFError): going on from the one before" in said
    assert said.index(f"resumed from step 3 of {start.directory}") > 1
    cut(newest / MODEL)
    (start.directory / TRACKER).write_text("6")
    code, said = start()
    assert code == 0 and said[0].startswith(f"warning: {newest} cannot be read: {MODEL} is cut off")
    assert said[1] == f"resumed from step 3 of {start.directory}"
    code, (*warned, said) = start("trainer.resume_mode=resume_path", f"trainer.resume_from_path={newest}")
    assert warned == []
    assert code == 2 and f"trainer.resume_from_path={start.directory}/checkpoints/global_step_3 [run_dir.check" in said


def test_wandb_goes_on_in_the_same_run(start, monkeypatch):
    def named(*overrides):
        monkeypatch.delenv("WANDB_RUN_ID", raising=False)
        assert start(*overrides)[0] == 0
        return (start.directory / "wandb_run_id").read_text()

    first, second, folder = named(), named(), checkpoint(start.directory, 3)
    assert first != second == named(), "began again: nothing to go on from"
    fork = f"trainer.default_local_dir={start.directory.parent}/fork"
    assert named("trainer.resume_mode=resume_path", f"trainer.resume_from_path={folder}", fork) != second
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    start("trainer.resume_mode=disable")
    assert (start.directory / "wandb_run_id").read_text() == "mine\n"
