"""The report of runs whose answers are known by hand. tests/end_to_end/test_replicas.py draws real ones,
tests/recipe/sam_dapo/test_bench.py has stock vLLM beside a run."""

import json
import re

import pytest

from recipe.sam_dapo.report import pictures
from recipe.sam_dapo.report.answer import compare_curves
from recipe.sam_dapo.report.page import main
from recipe.sam_dapo.report.phases import gain_of, phases_of, table_of_phases
from recipe.sam_dapo.report.runs import Run, drafted_texts, load_runs
from recipe.sam_dapo.tiny.tokenizer import build_tokenizer
from sam.record.engine_steps import EngineSteps
from sam.record.responses import read_recording
from sam.tools.replay import make_drafter, replay
from tests.recipe.sam_dapo.run_directory import write_run

REWARDS = [0.0, 0.1, 0.2, 0.5, 0.6, 0.7]


@pytest.fixture(autouse=True)
def nothing_is_drawn(monkeypatch):
    """Which takes seconds."""
    monkeypatch.setattr("recipe.sam_dapo.report.page.draw_rollout", lambda runs, against: [])
    monkeypatch.setattr("recipe.sam_dapo.report.page.draw_phases", lambda runs: [])


def make_run(directory, method, seconds, rewards, different=(), seed=0, first=1):
    """A run of len(rewards) steps; responses named in `different` (step, prompt, sample) differ from the others'."""
    config = {"speculation": {"method": method, "batch_size_threshold": 2, "num_speculative_tokens": 3}, "seed": seed}
    config["trainer"] = {"nnodes": 2, "n_gpus_per_node": 2, "device": "npu"}
    config["actor_rollout_ref"] = {"model": {"path": "/none/tiny_model"}}
    drafts = int(method == "sam")
    row = {
        "rollout/seconds": seconds, "rollout/tail_seconds": seconds / 2, "timing_s/step": seconds + 4.0,
        "timing_s/gen": seconds + 1.0, "timing_s/update_actor": 2.0, "timing_s/testing": 3.0,
        "rollout/draft_ms_per_step": 0.1 * drafts, "rollout/step_ms_per_step": 3.0,
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
        "Worth it: a training step takes 7.00 s with sam, 10.00 s with off, 30.0 % saved; drafting costs 0.10 s of it",
        "Times as fast, mean (range over 6 steps): training step 1.43x (1.43-1.43), rollout 2.00x (2.00-2.00), "
        "rollout's tail 2.00x (2.00-2.00).",
        "1,000 such steps: 7.8 instead of 11.1 device hours.",
        "Set-up: model none/tiny_model, 2 x 2 npu, verl 0.9.1.",
        "Identical responses: 23 of 24, token for token.",
        "Training curves, sam less off: reward +0.05 (one seed), response length identical, entropy identical. Another "
        "seed of both gives a band: sam report SAM OFF SAM2 OFF2.",
    ]
    assert f"Next: sam tune {runs[0]} looks for faster settings." in printed
    assert any(line.startswith("note: Stock vLLM was not measured: sam bench --run ") for line in printed)
    page, summary = ((tmp_path / "out" / name).read_text() for name in ("report.html", "summary.json"))
    assert all(
        line in page for line in (printed[0], printed[4], "speculation.<wbr>method", "sam run --config-name tiny")
    )
    summary = json.loads(summary)
    assert summary["seconds_a_step"]["training step"] == [7.0, 10.0]
    assert summary["accept_length"] == pytest.approx(2.8) and summary["accept_rate"] == pytest.approx(9 / 15)
    assert summary["identical_responses"] == 23 and summary["identical_by_step"]["4"] == [3, 4]
    said = "Not worth it: a training step takes 10.00 s with off, 7.00 s with sam, 42.9 % longer; drafting costs 0.00 s"
    assert report(*runs[::-1])[0].startswith(said)


def test_one_run_is_reported_too(runs, report):
    printed = report(runs[0])
    assert printed[:3] == [
        "Training step 7.00 s, rollout 3.00 s, rollout's tail 1.50 s: mean of 6 steps, speculation=sam",
        "Set-up: model none/tiny_model, 2 x 2 npu, verl 0.9.1.",
        "Next: the same command with speculation=off and another run_dir, then sam report RUN OFF.",
    ]
    assert not any("identical" in line.lower() or "Curves" in line for line in printed)


def test_phases_make_up_a_step_and_those_without_a_change_are_one_row(runs):
    loaded = load_runs(runs)
    step, *parts = phases_of(loaded)
    assert sum(part.means for part in parts if not part.depth).tolist() == step.means.tolist() == [7.0, 10.0]
    assert [part.name for part in parts if part.depth] == ["rollout", "rollout's tail"]
    header, rows = table_of_phases(loaded)
    assert header[1:3] == ("off", "sam")
    assert rows == [
        ("training step", "10.00", "7.00", "3.00 s, 30.0 %", "1.43x (1.43-1.43)"),
        ("gen", "7.00", "4.00", "3.00 s, 42.9 %", "1.75x (1.75-1.75)"),
        ("· rollout", "6.00", "3.00", "3.00 s, 50.0 %", "2.00x (2.00-2.00)"),
        ("· · rollout's tail", "3.00", "1.50", "1.50 s, 50.0 %", "2.00x (2.00-2.00)"),
        ("unchanged within noise: update_actor, rest of the step", "3.00", "3.00", "-", "-"),
    ]


def test_a_difference_within_noise_is_called_none(runs, report):
    """Of steps that went up and down by more than they differ."""
    for run, apart in ((runs[0], -0.2), (runs[1], 0.2)):
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        for row in rows[1:]:
            row["timing_s/step"] = 8.0 + apart * (-1) ** row["step"] + 0.01 * apart
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert gain_of(phases_of(load_runs(runs))[0], None).is_noise
    assert report(*runs)[0].startswith("No difference beyond noise: a training step takes 8.00 s with sam, 8.00 s with")


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
    prompt, *shown = drafted_texts(Run.load(run))
    assert prompt == [(tokenizer.decode([7]), "given")]
    assert ["".join(text for text, _ in pieces) for pieces in shown] == texts
    of_kind = {kind: [text for pieces in shown for text, its in pieces if its == kind] for kind in ("given", "drafted")}
    assert of_kind["given"] == ["ffff"] and sum(map(len, of_kind["drafted"])) == accepted > 20
    (tmp_path / "tokenizer.json").unlink()
    assert drafted_texts(bare := Run.load(run)) == [] and "a model's folder with tokenizer.json" in bare.remarks[0]
    bare.config["actor_rollout_ref"]["model"]["path"] = None
    assert drafted_texts(bare) == [] and "a model's folder with tokenizer.json, got 'None'" in bare.remarks[1]


def test_what_was_recorded_is_drawn_and_what_was_not_is_said(runs, report, monkeypatch):
    monkeypatch.setattr(pictures, "CURVES", ())
    steps = EngineSteps(step_ms=[5.0] * 9, running=[4] * 9, drafted=[3] * 9, drafted_at=[9, 5], accepted_at=[6, 1])
    (runs[0] / "engine_steps").mkdir()
    for step in range(1, 7):
        steps.save(runs[0], step)
    assert [one.title for one in pictures.draw_phases(load_runs(runs))] == ["Where a training step's seconds go"]
    drawn = ["Running requests, drafts verified and accepted", "Acceptance by position in a draft"]
    assert [one.title for one in pictures.draw_rollout(load_runs(runs), None)] == drawn
    assert any(line.startswith("note: no times of responses in ") for line in report(*runs))
    for file in (run / "rollouts" / f"{step}.jsonl" for run in runs for step in range(1, 7)):
        rows = [json.loads(line) | {"generated_s": [7.0, 8.5]} for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    drawn.insert(1, "When each response was generated")
    assert [one.title for one in pictures.draw_rollout(load_runs(runs), None)] == drawn
    assert not any("no times of responses" in line for line in report(*runs))


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


def validated(directory, method, *right, different=()):
    """A run that has answered problems of two data sets, each two times; `right`: how many times rightly. The last
    problem comes twice in the data."""
    config = {"speculation": {"method": method}, "trainer": {"val_only": True}}
    write_run(directory, config, [{"step": 0, "val-core/gsm8k/acc/mean@2": 0.5}], {})
    (directory / "val_rollouts").mkdir()
    rows = [
        {"prompt": n, "sample": sample, "data_source": ("gsm8k", "aime")[n // 3], "prompt_tokens": [min(n, 4)],
         "acc": float(sample < count),
         "response_tokens": [n, sample, int((n, sample) in different)]}
        for n, count in enumerate(right) for sample in range(2)
    ]  # fmt: skip
    (directory / "val_rollouts" / "0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def test_of_runs_that_only_validate_pass_at_1_is_compared_problem_by_problem(report, tmp_path):
    sam = validated(tmp_path / "sam", "sam", 2, 1, 0, 1, 2, 0)
    printed = report(sam, validated(tmp_path / "off", "off", 1, 1, 0, 1, 2, 0, different={(0, 1)}))
    assert [re.split(" {2,}", line.strip()) for line in printed[:3]] == [
        ["data set", "problems", "samples", "sam", "off", "first less second"],
        ["aime", "2", "3", "50.0 % (50.0 to 50.0)", "50.0 % (50.0 to 50.0)", "0.0 % (0.0 to 0.0)"],
        ["gsm8k", "3", "2", "50.0 % (0.0 to 100.0)", "33.3 % (0.7 to 66.0)", "16.7 % (-16.0 to 49.3)"],
    ]
    assert printed[3] == "Identical responses: 11 of 12, token for token."
    assert "16.7 % (-16.0 to 49.3)" in (tmp_path / "out" / "report.html").read_text()
    (sam / "val_rollouts" / "0.jsonl").unlink()
    assert main([str(sam)]) == 2
