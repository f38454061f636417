"""recipe.whole_runs: whole runs in turn, and what is told from them; the trainings are stand-ins."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipe import whole_runs

VARIANTS = ["speculation=suffix", "speculation=sam speculation.scope=history"]
SECONDS = [[2.0, 4.0], [1.0, 2.0]]  # of the first round, by variant and step; each further round takes as long again


def write_run(directory, other):
    """A finished run of two steps, whose folder says round and variant."""
    round_, variant = (int(part[-1]) for part in directory.parts[-2:])
    (directory / "rollouts").mkdir(parents=True)
    (directory / "config.yaml").write_text(json.dumps({"speculation": {"method": "sam"}}))
    (directory / "versions.json").write_text("{}")
    rows = []
    for step, seconds in enumerate(SECONDS[variant - 1], start=1):
        length = float(variant + step)
        counts = {f"rollout/spec_{name}": 1.0 for name in ("verify_steps", "accepted_tokens", "drafted_tokens")}
        counts["rollout/spec_accept_length"] = length
        rows.append({"step": step, "rollout/seconds": seconds * round_, **counts})
        line = {"prompt": 0, "sample": 0, "prompt_tokens": [1], "response_tokens": [step, int(other)]}
        (directory / "rollouts" / f"{step}.jsonl").write_text(json.dumps(line) + "\n")
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (directory / "state.json").write_text(json.dumps({"phase": "finished"}))


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """Runs the command; returns its exit code and the trainings that it started."""

    def run(*arguments, code=0, other=None):
        started = []

        def train(command):
            started.append(command)
            directory = Path(next(word for word in command if word.startswith("run_dir="))[8:])
            if not code:
                write_run(directory, directory.name == other)
            return SimpleNamespace(returncode=code)

        monkeypatch.setattr(whole_runs.subprocess, "run", train)
        return whole_runs.main(["--output", str(tmp_path), "--rounds", "3", *arguments]), started

    return run


def test_runs_take_turns_and_are_compared_with_the_first_of_their_round(compare, tmp_path, capsys):
    code, started = compare("--variants", *VARIANTS)
    first_words = [next(word for word in command if word.startswith("speculation")) for command in started]
    sam, suffix = "speculation=sam", "speculation=suffix"
    assert code == 0 and first_words == [suffix, sam, sam, suffix, suffix, sam]
    assert "speculation.scope=history" in started[1]
    text = capsys.readouterr().out
    assert "rollout seconds of a run: 6.00 (3.00 to 9.00)" in text
    assert "over the first variant: 2.00x (2.00-2.00), 3 rounds: go\n  mean acceptance length: 3.50\n" in text
    peer, ours = json.loads((tmp_path / "result.json").read_text())
    assert peer["seconds"] == [6.0, 12.0, 18.0] and ours["seconds"] == [3.0, 6.0, 9.0]
    assert peer["ratio"] == 1.0 and ours["acceptance_length"] == [3.5] * 3
    assert compare("--variants", *VARIANTS) == (0, []), "finished runs are not repeated"


def test_what_cannot_be_compared_is_one_line(compare, capsys):
    def error(*arguments, **training):
        code, _ = compare(*arguments, **training)
        return code, capsys.readouterr().err.splitlines()[-1]

    for words in (["a"], ["a", "a"], ["a", "b", "--rounds", "0"]):
        code, line = error("--variants", *words)
        assert code == 2 and "expected 1 or more rounds of two variants or more" in line
    code, line = error("--variants", *VARIANTS, code=3)
    assert code == 1 and "the run ended with exit code 3" in line
    code, line = error("--variants", *VARIANTS, other="variant_2")
    assert code == 1 and "round_1/variant_2: other steps or responses than" in line
