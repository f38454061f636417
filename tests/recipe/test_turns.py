"""recipe.turns: the order in which policies rotate, and what is told from the seconds of all runs together."""

import json

import numpy as np
import pytest

from recipe import turns
from recipe.report.runs import ReportError
from recipe.turns import effects, read, table, williams_square

POLICIES = ["never", "threshold 8", "always", "goodput"]
RATIOS = np.array([1.6, 1.2, 1.1, 1.0])


@pytest.mark.parametrize("size", [3, 4, 5, 8])
def test_each_policy_has_each_step_once_in_all_runs_and_follows_each_other_as_often(size):
    square = williams_square(size)
    for line in (*square, *square.T):
        assert sorted(line) == list(range(size))
    follows = [(a, b) for row in square for a, b in zip(row[:-1], row[1:], strict=True)]
    if size % 2 == 0:
        assert len(set(follows)) == len(follows) == size * (size - 1)


def measured(noise, cycles=2):
    """Seconds of a machine that is up to twice as slow in one run as in another, and of steps of other lengths."""
    rng = np.random.default_rng(0)
    policy = np.tile(williams_square(4), cycles)
    by_run, by_step = rng.uniform(1, 2, (4, 1)), rng.uniform(1, 3, (1, 4 * cycles))
    return by_run * by_step * RATIOS[policy] * np.exp(noise * rng.standard_normal(policy.shape)), policy


def test_the_machines_speed_and_the_steps_lengths_do_not_count():
    for index, (ratio, low, high) in enumerate(effects(*measured(noise=0.0), 4, baseline=3)):
        assert (ratio, low, high) == pytest.approx((RATIOS[index],) * 3)


def test_intervals_hold_the_truth_and_narrow_with_more_cycles():
    few, many = (effects(*measured(0.05, cycles), 4, baseline=3) for cycles in (2, 32))
    for (_, low, high), (_, lower, higher), truth in zip(few[:3], many[:3], RATIOS[:3], strict=True):
        assert low < truth < high and lower < truth < higher
        assert higher / lower < (high / low) ** 0.5
    assert few[3] == (1.0, 1.0, 1.0)


def test_too_few_steps_are_said_to_be():
    seconds, policy = measured(0.05)
    with pytest.raises(ValueError, match="1 runs of 4 steps do not tell 4 policies apart"):
        effects(seconds[:1, :4], policy[:1, :4], 4, 3)


def write_runs(folder, different=None):
    """Run directories of four policies in rotation, a second of rollout more from policy to policy."""
    directories = []
    for number, row in enumerate(williams_square(4), start=1):
        directory = folder / str(number)
        (directory / "rollouts").mkdir(parents=True)
        (directory / "engine_steps").mkdir()
        config = {"speculation": {"method": "sam", "turns": [POLICIES[i] for i in row]}}
        (directory / "config.yaml").write_text(json.dumps(config))
        (directory / "versions.json").write_text("{}")
        rows = []
        for step, policy in enumerate(row.tolist(), start=1):
            seconds = {"rollout/seconds": 2.0 + policy, "rollout/tail_seconds": 1.0 + policy}
            rows.append({"step": step, "rollout/drafter/policy_index": step - 1.0, **seconds})
            text = [step, int((number, step) == different)]
            line = {"prompt": 0, "sample": 0, "prompt_tokens": [1], "response_tokens": text}
            (directory / "rollouts" / f"{step}.jsonl").write_text(json.dumps(line) + "\n")
        (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        directories.append(directory)
    return directories


def test_runs_are_read_with_who_drafted_in_each_step(tmp_path):
    seconds, policy = read(write_runs(tmp_path), POLICIES)
    assert (policy == williams_square(4)).all()
    assert (seconds["rollout"] == 2.0 + policy).all() and (seconds["tail"] == 1.0 + policy).all()
    rows = {(row["measure"], row["policy"]): row for row in table(seconds, policy, POLICIES, "goodput")}
    assert rows["rollout", "never"]["seconds"] == 2.0 and rows["tail", "goodput"]["seconds"] == 4.0
    assert rows["rollout", "never"]["ratio"][0] == pytest.approx(2.0 / 5.0)


def test_runs_without_recorded_responses_are_refused(tmp_path):
    directories = write_runs(tmp_path)
    (directories[2] / "rollouts" / "1.jsonl").unlink()
    with pytest.raises(ReportError, match="3: no responses of step 1 to compare"):
        read(directories, POLICIES)


def test_runs_whose_responses_differ_are_refused(tmp_path):
    with pytest.raises(ReportError, match="3: other responses than .*1 in step 2"):
        read(write_runs(tmp_path, different=(3, 2)), POLICIES)


def test_runs_of_other_policies_are_refused(tmp_path):
    with pytest.raises(ReportError, match="its policies or steps are others"):
        read(write_runs(tmp_path), ["never", "threshold 4", "always", "goodput"])


def test_the_command_trains_as_many_runs_as_policies_in_the_squares_order(tmp_path, monkeypatch, capsys):
    commands = []

    def train(command):
        commands.append(command)
        return type("Ended", (), {"returncode": 0})

    write_runs(tmp_path / "turns")
    monkeypatch.setattr(turns.subprocess, "run", train)
    monkeypatch.setattr(turns, "against_stock", lambda run, output: (run.name, output.name))
    monkeypatch.setattr(turns, "measured", "stock beside {}".format)
    arguments = ["--output", str(tmp_path / "turns"), "--policies", *POLICIES, "--json", str(tmp_path / "rows.json")]
    assert turns.main(arguments) == 0
    orders = [next(word for word in command if word.startswith("speculation.policy_rotation=")) for command in commands]
    assert orders[0] == "speculation.policy_rotation=[never,threshold 8,goodput,always]" and len(set(orders)) == 4
    printed = capsys.readouterr().out
    assert "goodput" in printed and printed.endswith("stock beside ('1', 'turns')\n")
    assert len(json.loads((tmp_path / "rows.json").read_text())) == 8


def test_a_run_that_fails_is_said_to(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(turns.subprocess, "run", lambda command: type("Ended", (), {"returncode": 3}))
    assert turns.main(["--output", str(tmp_path), "--policies", *POLICIES]) == 1
    assert "exit code 3" in capsys.readouterr().err


@pytest.mark.parametrize("policies", [["never", "goodput"], ["never", "always", "threshold 8"]])
def test_policies_that_cannot_be_compared_are_refused(policies, capsys):
    assert turns.main(["--policies", *policies]) == 2
    assert "expected three or more, goodput among them" in capsys.readouterr().err
