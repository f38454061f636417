"""The report of runs whose answers are known by hand: its page, its summary, and what it prints."""

import json
import re

import numpy as np
import pytest

from sam.bench.result import compared
from sam.record.responses import read_recording
from sam.replay import make_drafter, replay
from sam_recipe.report.page import compare_curves, main
from sam_recipe.report.runs import STOCK_FILE, Run, drafted_texts, load_runs, text_of
from tests.recipe.run_directory import write_lines, write_run

REWARDS = [0.0, 0.1, 0.2, 0.5, 0.6, 0.7]


def make_run(directory, method, seconds, rewards, different=(), seed=0):
    """A run of len(rewards) steps; responses named in `different` (step, prompt, sample) differ from the others'."""
    config = {"speculation": {"method": method, "batch_size_threshold": 2, "num_speculative_tokens": 3}, "seed": seed}
    drafts = int(method == "sam")
    row = {
        "rollout/seconds": seconds, "rollout/tail_seconds": seconds / 2, "response_length/mean": 9.0,
        "rollout/spec_accept_length": 1 + 1.8 * drafts, "rollout/spec_verify_steps": 5.0 * drafts,
        "rollout/spec_accepted_tokens": 9.0 * drafts, "rollout/spec_drafted_tokens": 15.0 * drafts,
        "actor/entropy": 0.1, "actor/grad_norm": 1.0, "timing_s/step": 5.0 - drafts,
    }  # fmt: skip
    steps = dict(enumerate(rewards, start=1))
    metrics = [{"step": 0, "val-core/task/acc/mean@1": 0.5}]
    for step, reward in steps.items():
        accuracy = {"rollout/reward_all/mean": reward, "rollout/acc_all/mean": (reward + 1) / 2}
        metrics.append({"step": step, **accuracy, **row})
    responses = {
        step: [
            {"prompt": prompt, "sample": sample, "prompt_tokens": [prompt + 1],
             "response_tokens": [step, prompt, sample, int((step, prompt, sample) in different)]}
            for prompt in range(2) for sample in range(2)
        ]
        for step in steps
    }  # fmt: skip
    write_run(directory, config, metrics, responses, command="sam run --config-name tiny")
    (directory / "engine_steps").mkdir()
    for step in steps:
        np.savez(
            directory / "engine_steps" / f"{step}.npz",
            step_ms=np.full(6, 1000 * seconds / 6), running=np.array([1, 4, 3, 2, 2, 1]),
            drafted=np.array([0, 0, 0, 6, 6, 3]) * drafts, accepted=np.array([0, 0, 0, 3, 4, 2]) * drafts,
        )  # fmt: skip
    return directory


def change_metrics(run, change):
    """Have `change` alter each row of a run's metrics.jsonl but the first validation's."""
    first, *rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    for row in rows:
        change(row)
    write_lines(run / "metrics.jsonl", [first, *rows])


@pytest.fixture
def runs(tmp_path):
    sam = make_run(tmp_path / "sam", "sam", 3.0, REWARDS, different={(4, 1, 0)})
    return sam, make_run(tmp_path / "off", "off", 6.0, [0.0, 0.1, 0.2, 0.4, 0.5, 0.6])


@pytest.fixture
def report(runs, tmp_path, capsys, monkeypatch):
    """Writes the report of both runs; returns summary, page and what was printed."""

    def write(draws=False):
        if not draws:  # which takes seconds
            monkeypatch.setattr("sam_recipe.report.page.draw_all", lambda runs: [])
        assert main([*map(str, runs), "--output", str(tmp_path / "out")]) == 0
        files = [tmp_path / "out" / name for name in ("summary.json", "report.html")]
        return json.loads(files[0].read_text()), files[1].read_text(), capsys.readouterr().out

    return write


def pictures(page):
    return re.findall(r"<img alt='(.*?)' src='data:image/svg", page)


def test_the_page_gives_the_answer_first(report, tmp_path):
    summary, page, printed = report(draws=True)
    seconds = {"training step": [4.0, 5.0], "its rollout": [3.0, 6.0], "the rollout's tail": [1.5, 3.0]}
    assert summary["seconds_a_step"] == seconds and summary["rollout_seconds"] == {"sam": 18.0, "off": 36.0}
    assert summary["accept_length"] == pytest.approx(2.8) and summary["accept_rate"] == pytest.approx(9 / 15)
    assert (summary["identical_responses"], summary["total_responses"]) == (23, 24)
    assert summary["identical_by_step"]["4"] == [3, 4]
    assert "http" not in page and "<script" not in page
    assert printed.splitlines()[:6] == [
        "Training step 5.00 s to 4.00 s: 1.25x as fast, 20.0 % of time saved",
        "Its rollout 6.00 s to 3.00 s: 2.00x as fast, 50.0 % of time saved",
        "The rollout's tail 3.00 s to 1.50 s: 2.00x as fast, 50.0 % of time saved",
        "Mean of 6 steps, speculation=off to sam.",
        "Identical responses: 23 of 24, token for token.",
        "Curves, first less second: reward +0.05 (one seed), response length identical, accuracy +0.025 (one seed), "
        "entropy identical, gradient norm identical. A band needs other seeds too: sam report SAM OFF SAM2 OFF2.",
    ]
    assert page.index("<p>Training step 5.00 s to 4.00 s") < page.index("<p>Identical responses") < page.index("<img")
    assert "<td>speculation.method</td>" in page and "<td>sam run --config-name tiny</td>" in page
    assert f"Next: sam tune {tmp_path / 'sam'} looks for faster settings." in printed
    assert pictures(page) == [
        "Running requests, and the drafts verified and accepted", "Reward", "Response length", "Accuracy",
        "Entropy", "Gradient norm", "Acceptance",
    ]  # fmt: skip
    assert printed.splitlines()[-1].endswith("report.html")
    assert "note: Stock vLLM was not measured: sam bench --run " in printed


ROUNDS = {"stock": [3.0, 6.0, 3.0, 3.4], "off": [3.0, 7.5, 3.0, 3.4], "sam": [2.0, 4.0, 1.5, 2.0]}


def stock_beside(run, folder, seconds=ROUNDS, **changes):
    """stock.json of rounds of four requests; in the second one all engines took twice as long."""
    names = ("tokens_per_s", "step_ms", "steps", "responses")
    row = dict.fromkeys(names, 1.0) | dict.fromkeys(("acceptance_length", "drafted", "accepted", "identical"))
    rows = [
        {"variant": engine, "requests": 4, "rounds": len(its), "seconds": float(np.median(its)), "by_round": its}
        | row
        | compared(its, seconds["stock"])
        for engine, its in seconds.items()
    ]
    found = {"text": text_of(Run.load(run), [1, 3, 5]), "steps": [1, 3, 5], "date": "2026-01-01", "rows": rows}
    folder.mkdir(exist_ok=True)
    (folder / STOCK_FILE).write_text(json.dumps(found | {"settings": {"text": "a"}, "reference": "stock"} | changes))


def test_one_run_is_reported_too(runs, tmp_path, capsys):
    assert main([str(runs[0]), "--output", str(tmp_path / "out")]) == 0
    printed, page = capsys.readouterr().out, (tmp_path / "out" / "report.html").read_text()
    assert printed.splitlines()[:5] == [
        "Training step 4.00 s", "Its rollout 3.00 s", "The rollout's tail 1.50 s", "Mean of 6 steps, speculation=sam.",
        "Next: the same command with speculation=off and another run_dir, then sam report RUN OFF.",
    ]  # fmt: skip
    assert pictures(page)[0] == "Running requests, and the drafts verified and accepted"
    assert "identical" not in printed.lower() and "Curves" not in printed
    assert "<th>steps with it</th><th>first</th></tr>" in page


def test_engines_alone_stand_below_the_step(runs, report, tmp_path):
    stock_beside(runs[0], tmp_path / "out")
    summary, page, printed = report()
    assert [summary["stock"]["sam"][name] for name in ("ratio", "low", "high")] == [1.6, 1.5, 2.0]
    order = [
        "<p>Training step 5.00 s", "sam 1.60x (1.50-2.00) as fast as stock vLLM: go",
        "without drafts (off) 1.00x (0.80-1.00)", "<h2>Engines alone, on the recorded text</h2>",
    ]  # fmt: skip
    assert sorted(map(page.index, order)) == [page.index(part) for part in order]
    assert "note: engines alone drafted with policy=goodput, the run with policy=None" in printed
    stock_beside(runs[0], tmp_path / "out", text="0123456789abcdef")
    _, page, printed = report()
    assert "stock.json is of another run's text and left out" in printed and "as fast as stock vLLM" not in page


def test_curves_are_identical_or_differ_by_so_much_with_a_band_over_seeds(runs, tmp_path):
    def pair(name, rewards, seed, other_seed=None):
        sam = make_run(tmp_path / f"sam_{name}", "sam", 3.0, rewards, seed=seed)
        return sam, make_run(
            tmp_path / f"off_{name}", "off", 6.0, [0.0, 0.0], seed=seed if other_seed is None else other_seed
        )

    change_metrics(runs[1], lambda row: row.update({"actor/entropy": float("nan")} if row["step"] == 3 else {}))
    found = compare_curves(load_runs(runs))
    assert found["entropy"] == "identical" and found["reward"] == "+0.05 (one seed)"
    more = [*pair("b", [0.1, 0.3], 1), *pair("of_two_seeds", [9.0, 9.0], 2, 3), *pair("of_a_seed_again", [9.0, 9.0], 1)]
    found = compare_curves(load_runs([*runs, *more]))
    # Of 0.05 and 0.2.
    assert found["reward"] == "+0.12 (+0.05 to +0.2, 2 seeds)" and found["response length"] == "identical"


def test_a_loss_is_longer(runs, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("sam_recipe.report.page.draw_all", lambda runs: [])
    assert main([*map(str, runs[::-1]), "--output", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.startswith("Training step 4.00 s to 5.00 s: 0.80x as fast, 25.0 % longer\n")


def test_accepted_drafts_of_responses_are_marked(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: number for number, word in enumerate("abcdefgh")}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = [[1, 2, 3, 4] * 6, [1, 2, 3, 4] * 4 + [5] * 4 + [1, 2], []]
    rows = [{"prompt": 0, "sample": n, "prompt_tokens": [7], "response_tokens": its} for n, its in enumerate(texts)]
    rows[1]["given_spans"] = [[16, 20]]
    other = rows[0] | {"prompt": 1, "response_tokens": [6] * 30}
    settings = {"method": "sam", "num_speculative_tokens": 3}
    config = {"speculation": settings, "actor_rollout_ref": {"model": {"path": str(tmp_path)}}}
    run = write_run(tmp_path / "run", config, [{"step": 1, "rollout/seconds": 1.0}], {1: rows})
    accepted = replay(read_recording(run / "rollouts" / "1.jsonl"), lambda: make_drafter("sam", "group", 3), 3).accepted
    write_lines(run / "rollouts" / "1.jsonl", [*rows, other])
    shown = drafted_texts(Run.load(run))
    said = ["".join(text for text, _ in pieces).split() for pieces in shown]
    assert said == [["abcdefgh"[token] for token in text] for text in texts if text]
    assert shown[0][0] == ("b", "") and [text.split() for text, kind in shown[1] if kind == "given"] == [["f"] * 4]
    drafted = [text for pieces in shown for text, kind in pieces if kind == "drafted"]
    assert sum(len(text.split()) for text in drafted) == accepted > 20
    assert drafted_texts(Run.load(make_run(tmp_path / "off", "off", 1.0, [0.0]))) == []
    (tmp_path / "tokenizer.json").unlink()
    assert drafted_texts(bare := Run.load(run)) == [] and "a model's folder with tokenizer.json" in bare.remarks[0]


def test_broken_input_is_one_line(runs, tmp_path, capsys):
    (empty := tmp_path / "empty").mkdir()
    (empty / "metrics.jsonl").write_text('{"step": 0, "val": 1}\n')
    late = make_run(tmp_path / "late", "off", 6.0, [0.1])
    change_metrics(late, lambda row: row.update(step=9))
    for name in ("nowhere", "empty", "late"):
        assert main([str(runs[0]), str(tmp_path / name)]) == 2
    errors = capsys.readouterr().err.splitlines()
    said = ("no metrics.jsonl there", "config.yaml", "no training step in common")
    assert all(part in error for part, error in zip(said, errors, strict=True))


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "config.yaml", "versions.json", "rollouts/2.jsonl", "engine_steps/2.npz"]
)
def test_a_damaged_run_is_one_line_that_names_the_file(runs, name, tmp_path, capsys):
    (file := runs[0] / name).write_bytes(b"[\n" + file.read_bytes()[:77])
    assert main([*map(str, runs), "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {file}") and error.count("\n") == 1 and not (tmp_path / "out").exists()
