"""What a start says and does before and after its training: refused, resumed, over already."""

import pytest

from recipe.sam_dapo import preflight
from recipe.sam_dapo.launch import supervisor
from recipe.sam_dapo.launch.screen import Ending
from recipe.sam_dapo.main_dapo import main
from recipe.sam_dapo.record import read_metrics
from tests.recipe.sam_dapo.launch.test_screen import checkpoint


@pytest.fixture
def start(tmp_path, monkeypatch, capsys):
    """Starts a run whose training is over at once; returns the exit code and what the screen said before it."""
    monkeypatch.setattr(preflight, "check", lambda *_, **__: None)
    monkeypatch.setattr(supervisor, "supervise", lambda *_: Ending(0))
    monkeypatch.chdir(tmp_path)

    def start(*overrides):
        code = main(["--config-name", "dapo_tiny_cpu", "run_dir=run", *overrides])
        out, error = capsys.readouterr()
        return code, [*error.splitlines(), *out.splitlines()]

    start.directory = tmp_path / "run"
    return start


def test_a_second_run_in_the_same_directory_is_refused(start):
    with supervisor.lock(start.directory):
        code, (said,) = start()
    assert code == 2 and "is used by a run that goes on" in said
    assert not (start.directory / "config.yaml").exists()


def test_a_resumed_run_says_where_it_goes_on_and_one_with_its_last_checkpoint_is_over(start):
    assert not any(line.startswith("resumed") for line in start()[1])
    (resumed := start.directory / "wandb").mkdir()
    (resumed / "wandb-resume.json").write_text("{}")
    checkpoint(start.directory, 3)
    _, (said, *_) = start()
    assert said == f"resumed from step 3 of {start.directory}" and said in (start.directory / "train.log").read_text()
    assert (resumed / "wandb-resume.json").exists(), "wandb goes on in the same run"
    code, (said,) = start("trainer.total_training_steps=3")
    assert code == 0 and said.startswith(f"{start.directory} holds this run, finished after 3 steps: nothing to do")
    assert start("trainer.resume_mode=disable")[0] == 0 and not (resumed / "wandb-resume.json").exists()


def test_a_run_with_a_damaged_checkpoint_goes_on_from_the_one_before_and_says_so(start):
    start()
    checkpoint(start.directory, 3)
    (damaged := checkpoint(start.directory, 6) / "data.pt").write_bytes(b"")
    metrics = start.directory / "metrics.jsonl"
    metrics.write_text("".join(f'{{"step": {step}}}\n' for step in range(7)))
    before = f"resumed from step 3 of {start.directory}"
    assert start()[1][:2] == [f"warning: {damaged.parent} is damaged: the checkpoint before it is taken", before]
    assert [*read_metrics(start.directory)] == [0, 1, 2, 3], "the screen would show steps that are to be repeated"
    assert start()[1][0] == before, "verl's tracker names it now"
    start("trainer.resume_mode=disable")
    assert not read_metrics(start.directory)


def test_a_directory_with_a_finished_run_of_another_setting_says_so(start):
    over = "trainer.total_training_steps=3"
    start(over)
    checkpoint(start.directory, 3)
    listed = "actor_rollout_ref.actor.optim.lr 0.0002 -> 0.001"
    for words in ((), ("--check",)):
        code, (said,) = start(over, "actor_rollout_ref.actor.optim.lr=1e-3", *words)
        assert code == 2
        assert said.startswith(
            f"error: run_dir={start.directory} holds a run that finished after step 3, changed: {listed}:"
        )
    code, (said,) = start(over, "speculation=off")
    assert code == 0 and f"{start.directory} holds this run, finished after 3 steps: nothing to do, with other" in said
    assert "speculation.method sam -> off" in said
    assert "other settings" not in start(over)[1][0] and start(over, "--check") == (0, [])
    (start.directory / "state.json").write_text('{"phase": "finished"}')
    code, said = start(over, "trainer.resume_mode=disable", "actor_rollout_ref.actor.optim.lr=1e-3")
    assert code == 0 and said[0] == f"{start.directory} held a finished run, which this one replaces"
    assert listed in said[1]


def test_changed_settings_are_refused_or_listed_and_the_old_ones_kept(start):
    start()
    checkpoint(start.directory, 3)
    changed = ("actor_rollout_ref.actor.optim.lr=1e-3", "trainer.save_freq=1")
    listed = "actor_rollout_ref.actor.optim.lr 0.0002 -> 0.001"
    config = (start.directory / "config.yaml").read_text()
    code, (said,) = start(*changed)
    assert code == 2 and f"goes on from step 3, changed: {listed}: it would" in said
    assert said.endswith("choose another run_dir=, or add --accept-changes [run_dir.changed]")
    assert (start.directory / "config.yaml").read_text() == config
    code, said = start(*changed, "--accept-changes")
    assert code == 0 and said[0].startswith("resumed from step 3")
    assert said[1] == f"changed since then: {listed}, trainer.save_freq 5 -> 1"
    assert (start.directory / "config.until_step_3.yaml").read_text() == config
