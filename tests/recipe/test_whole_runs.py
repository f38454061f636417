"""recipe.whole_runs: whole runs in turn, and what is told from them."""

import json

import pytest

from recipe import whole_runs
from recipe.report.runs import ReportError
from recipe.whole_runs import as_text, read, table

VARIANTS = ["speculation=suffix", "speculation=sam speculation.scope=history"]
SECONDS = [[2.0, 4.0], [1.0, 2.0]]  # of the first round, by variant and step; each further round takes as long again


def write_run(directory, round_, variant, other=False):
    (directory / "rollouts").mkdir(parents=True)
    (directory / "config.yaml").write_text(json.dumps({"speculation": {"method": "sam"}}))
    (directory / "versions.json").write_text("{}")
    rows = []
    for step, seconds in enumerate(SECONDS[variant], start=1):
        length = 1.0 + variant + step
        rows.append({"step": step, "rollout/seconds": seconds * round_, "rollout/spec_accept_length": length})
        line = {"prompt": 0, "sample": 0, "prompt_tokens": [1], "response_tokens": [step, int(other)]}
        (directory / "rollouts" / f"{step}.jsonl").write_text(json.dumps(line) + "\n")
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "state.json").write_text(json.dumps({"phase": "finished"}))


def write_runs(folder, rounds=3, other=None):
    for round_ in range(1, rounds + 1):
        for variant in range(2):
            where = folder / f"round_{round_}" / f"variant_{variant + 1}"
            write_run(where, round_, variant, other == (round_, variant))
    return [[folder / f"round_{r + 1}" / f"variant_{v + 1}" for v in range(2)] for r in range(rounds)]


def test_a_variant_is_compared_with_the_first_one_of_its_own_round(tmp_path):
    peer, ours = table(read(write_runs(tmp_path)), VARIANTS)
    assert peer["seconds"] == [6.0, 12.0, 18.0] and ours["seconds"] == [3.0, 6.0, 9.0]
    assert peer["times_as_fast"] == [1.0] * 3 and ours["times_as_fast"] == [2.0] * 3
    assert ours["times_as_fast_by_step"] == [2.0, 2.0]
    assert ours["acceptance_length_by_step"] == [3.0, 4.0]
    assert "2.00 (2.00 to 2.00), 3 rounds; by training step 2.00, 2.00" in "\n".join(as_text([peer, ours]))


def test_runs_whose_responses_differ_are_refused(tmp_path):
    with pytest.raises(ReportError, match="round_2/variant_2: other steps or responses than"):
        read(write_runs(tmp_path, other=(2, 1)))


def test_runs_take_turns_and_finished_ones_are_not_repeated(tmp_path, monkeypatch, capsys):
    commands = []

    def train(command):
        commands.append(command)
        directory = next(word for word in command if word.startswith("run_dir="))[8:]
        round_, variant = (int(part[-1]) for part in directory.split("/")[-2:])
        write_run(tmp_path / f"round_{round_}" / f"variant_{variant}", round_, variant - 1)
        return type("Ended", (), {"returncode": 0})

    monkeypatch.setattr(whole_runs.subprocess, "run", train)
    arguments = ["--output", str(tmp_path), "--rounds", "2", "--variants", *VARIANTS]
    assert whole_runs.main(arguments) == 0
    first_words = [[word for word in command if word.startswith("speculation")][0] for command in commands]
    assert first_words == ["speculation=suffix", "speculation=sam", "speculation=sam", "speculation=suffix"]
    assert "speculation.scope=history" in commands[1] and len(json.loads((tmp_path / "result.json").read_text())) == 2
    assert whole_runs.main(arguments) == 0 and len(commands) == 4
    assert "times as fast as the first variant: 2.00" in capsys.readouterr().out


def test_a_run_that_fails_is_said_to(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(whole_runs.subprocess, "run", lambda command: type("Ended", (), {"returncode": 3}))
    assert whole_runs.main(["--output", str(tmp_path), "--variants", *VARIANTS]) == 1
    assert "exit code 3" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--variants", "a"], ["--variants", "a", "a"], ["--rounds", "0", "--variants", "a", "b"]]
)
def test_what_cannot_be_compared_is_refused(arguments, capsys):
    assert whole_runs.main(arguments) == 2
    assert "expected 1 or more rounds of two variants or more" in capsys.readouterr().err
