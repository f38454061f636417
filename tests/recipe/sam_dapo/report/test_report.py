"""The report of runs whose answers are known by hand. tests/end_to_end/test_replicas.py draws real ones,
tests/recipe/sam_dapo/test_bench.py has stock vLLM beside a run."""

import json

import pytest

from recipe.sam_dapo.report.page import compare_curves, main
from recipe.sam_dapo.report.runs import Run, drafted_texts, load_runs
from recipe.sam_dapo.tiny.tokenizer import build_tokenizer
from sam.record.responses import read_recording
from sam.replay import make_drafter, replay
from tests.recipe.sam_dapo.run_directory import write_run

REWARDS = [0.0, 0.1, 0.2, 0.5, 0.6, 0.7]


@pytest.fixture(autouse=True)
def nothing_is_drawn(monkeypatch):
    """Which takes seconds."""
    monkeypatch.setattr("recipe.sam_dapo.report.page.draw_all", lambda runs: [])


def make_run(directory, method, seconds, rewards, different=(), seed=0, first=1):
    """A run of len(rewards) steps; responses named in `different` (step, prompt, sample) differ from the others'."""
    config = {"speculation": {"method": method, "batch_size_threshold": 2, "num_speculative_tokens": 3}, "seed": seed}
    drafts = int(method == "sam")
    row = {
        "rollout/seconds": seconds, "rollout/tail_seconds": seconds / 2, "timing_s/step": 5.0 - drafts,
        "rollout/spec_verify_steps": 5.0 * drafts, "rollout/spec_accepted_tokens": 9.0 * drafts,
        "rollout/spec_drafted_tokens": 15.0 * drafts, "response_length/mean": 9.0, "actor/entropy": 0.1,
    }  # fmt: skip
    metrics, responses = [{"step": 0, "val-core/task/acc/mean@1": 0.5}], {}
    for step, reward in enumerate(rewards, start=first):
        metrics.append({"step": step, "rollout/reward_all/mean": reward, **row})
        responses[step] = [
            {"prompt": prompt, "sample": sample, "prompt_tokens": [1],
             "response_tokens": [step, prompt, sample, int((step, prompt, sample) in different)]}
            for prompt in range(2) for sample in range(2)
        ]  # fmt: skip
    return write_run(directory, config, metrics, responses, command="sam run --config-name tiny")


@pytest.fixture
def runs(tmp_path):
    sam = make_run(tmp_path / "sam", "sam", 3.0, REWARDS, different={(4, 1, 0)})
    return sam, make_run(tmp_path / "off", "off", 6.0, [0.0, 0.1, 0.2, 0.4, 0.5, 0.6])


@pytest.fixture
def report(tmp_path, capsys):
    """Writes the report of runs; returns what was printed."""

    def write(*runs):
        assert main([*map(str, runs), "--output", str(tmp_path / "out")]) == 0
        return capsys.readouterr().out.splitlines()

    return write


def test_the_answer_comes_first_and_stands_in_page_and_summary(runs, report, tmp_path):
    printed = report(*runs)
    assert printed[:6] == [
        "Training step 5.00 s to 4.00 s: 1.25x as fast, 20.0 % of time saved",
        "Its rollout 6.00 s to 3.00 s: 2.00x as fast, 50.0 % of time saved",
        "The rollout's tail 3.00 s to 1.50 s: 2.00x as fast, 50.0 % of time saved",
        "Mean of 6 steps, speculation=off to sam.",
        "Identical responses: 23 of 24, token for token.",
        "Curves, first less second: reward +0.05 (one seed), response length identical, entropy identical. A band "
        "needs other seeds too: sam report SAM OFF SAM2 OFF2.",
    ]
    assert f"Next: sam tune {runs[0]} looks for faster settings." in printed
    assert any(line.startswith("note: Stock vLLM was not measured: sam bench --run ") for line in printed)
    page, summary = ((tmp_path / "out" / name).read_text() for name in ("report.html", "summary.json"))
    assert all(line in page for line in (printed[0], printed[4], "speculation.method", "sam run --config-name tiny"))
    summary = json.loads(summary)
    assert summary["seconds_a_step"]["training step"] == [4.0, 5.0]
    assert summary["accept_length"] == pytest.approx(2.8) and summary["accept_rate"] == pytest.approx(9 / 15)
    assert summary["identical_responses"] == 23 and summary["identical_by_step"]["4"] == [3, 4]
    assert report(*runs[::-1])[0] == "Training step 4.00 s to 5.00 s: 0.80x as fast, 25.0 % longer"


def test_one_run_is_reported_too(runs, report):
    printed = report(runs[0])
    assert printed[:5] == [
        "Training step 4.00 s", "Its rollout 3.00 s", "The rollout's tail 1.50 s", "Mean of 6 steps, speculation=sam.",
        "Next: the same command with speculation=off and another run_dir, then sam report RUN OFF.",
    ]  # fmt: skip
    assert not any("identical" in line.lower() or "Curves" in line for line in printed)


def test_curves_are_identical_or_differ_by_so_much_with_a_band_over_seeds(runs, tmp_path):
    def pair(name, rewards, *seeds):
        """Of one seed, or of two."""
        sam = make_run(tmp_path / f"sam_{name}", "sam", 3.0, rewards, seed=seeds[0])
        return sam, make_run(tmp_path / f"off_{name}", "off", 6.0, [0.0, 0.0], seed=seeds[-1])

    found = compare_curves(load_runs(runs))
    assert found["entropy"] == "identical" and found["reward"] == "+0.05 (one seed)"
    more = [*pair("b", [0.1, 0.3], 1), *pair("of_two_seeds", [9.0, 9.0], 2, 3), *pair("of_a_seed_again", [9.0, 9.0], 1)]
    found = compare_curves(load_runs([*runs, *more]))
    # Of 0.05 and 0.2.
    assert found["reward"] == "+0.12 (+0.05 to +0.2, 2 seeds)" and found["response length"] == "identical"


def test_accepted_drafts_of_responses_are_marked(tmp_path):
    (tokenizer := build_tokenizer()).save_pretrained(tmp_path)
    texts = ["bcde" * 6, "bcde" * 4 + "ffff" + "bc"]
    rows = [{"prompt": 0, "sample": n, "prompt_tokens": [7]} for n in range(2)]
    for row, text in zip(rows, texts, strict=True):
        row["response_tokens"] = tokenizer.encode(text)
    rows[1]["given_spans"] = [[16, 20]]
    settings = {"method": "sam", "num_speculative_tokens": 3}
    config = {"speculation": settings, "actor_rollout_ref": {"model": {"path": str(tmp_path)}}}
    run = write_run(tmp_path / "run", config, [{"step": 1, "rollout/seconds": 1.0}], {1: rows})
    accepted = replay(read_recording(run / "rollouts" / "1.jsonl"), lambda: make_drafter("sam", "group", 3), 3).accepted
    shown = drafted_texts(Run.load(run))
    assert ["".join(text for text, _ in pieces) for pieces in shown] == texts
    of_kind = {kind: [text for pieces in shown for text, its in pieces if its == kind] for kind in ("given", "drafted")}
    assert of_kind["given"] == ["ffff"] and sum(map(len, of_kind["drafted"])) == accepted > 20
    (tmp_path / "tokenizer.json").unlink()
    assert drafted_texts(bare := Run.load(run)) == [] and "a model's folder with tokenizer.json" in bare.remarks[0]
    bare.config["actor_rollout_ref"]["model"]["path"] = None
    assert drafted_texts(bare) == [] and "a model's folder with tokenizer.json, got 'None'" in bare.remarks[1]


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "versions.json", "rollouts/2.jsonl", "late", "none"])
def test_runs_that_cannot_be_compared_are_one_line(runs, name, tmp_path, capsys):
    """A damaged file, no training step in common, or no run."""
    other = tmp_path / "none"
    if name == "late":
        other = make_run(tmp_path / "late", "off", 6.0, [0.1], first=9)
    elif name != "none":
        other = runs[1]
        (file := runs[0] / name).write_bytes(b"[\n" + file.read_bytes()[:77])
    assert main([str(runs[0]), str(other), "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and name in error and error.count("\n") == 1 and not (tmp_path / "out").exists()
