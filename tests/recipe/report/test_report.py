"""The report's figures against runs whose answers are known by hand."""

import json

import numpy as np
import pytest

from recipe.report.__main__ import main
from recipe.report.runs import Run, config_difference
from recipe.report.sources import by_source, draw_sources
from recipe.report.stock import AgainstStock, text_of
from sam.command import new_figure
from sam.drafting.origins import SOURCES
from sam.record.engine_steps import EngineSteps


def make_run(directory, method, seconds, rewards, different=()):
    """A run of len(rewards) steps; responses named in `different` (step, prompt, sample) differ from the others'."""
    for name in ("rollouts", "engine_steps"):
        (directory / name).mkdir(parents=True)
    config = {"speculation": {"method": method, "batch_size_threshold": 2, "num_speculative_tokens": 3}, "seed": 0}
    (directory / "config.yaml").write_text(json.dumps(config))
    (directory / "versions.json").write_text(json.dumps({"verl": "0.9.1", "commit": "abc"}))
    (directory / "peak_memory.json").write_text(json.dumps({"peak_memory_gib": 3.5 if method == "sam" else 3.0}))
    rows = [{"step": 0, "val-core/task/acc/mean@1": 0.5}]
    for step, reward in enumerate(rewards, start=1):
        rows.append({"step": step, "rollout/reward_all/mean": reward, "rollout/acc_all/mean": (reward + 1) / 2,
                     "rollout/seconds": seconds, "rollout/asynchronous_scheduling": float(method == "off"),
                     "response_length/mean": 9.0, "actor/entropy": 0.1,
                     "actor/grad_norm": 1.0, "timing_s/step": 5.0})  # fmt: skip
        speculating = method == "sam"
        arrays = {
            "step_ms": np.full(6, 1000 * seconds / 6),
            **{f"{part}_ms": np.full(6, 10.0) for part in ("forward", "verify", "draft")},
            "running": np.array([1, 4, 3, 2, 2, 1]),
            "drafted": np.array([0, 0, 0, 6, 6, 3]) * speculating,
            "accepted": np.array([0, 0, 0, 3, 4, 2]) * speculating,
            "position_steps": np.array([3, 2]) * speculating,
            "position_emitted": np.array([6, 8]) * speculating,
            "position_bin": np.array(32),
            "drafted_at": np.array([5, 5, 5] if speculating else []),
            "accepted_at": np.array([4, 3, 2] if speculating else []),
        }
        np.savez(directory / "engine_steps" / f"{step}.npz", **arrays)
        responses = [
            {"prompt": prompt, "sample": sample, "prompt_tokens": [prompt + 1],
             "response_tokens": [step, prompt, sample, int((step, prompt, sample) in different)]}
            for prompt in range(2) for sample in range(2)
        ]  # fmt: skip
        (directory / "rollouts" / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in responses))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


@pytest.fixture
def runs(tmp_path):
    sam = make_run(tmp_path / "sam", "sam", 3.0, [0.0, 0.1, 0.2, 0.5, 0.6, 0.7], different={(4, 1, 0)})
    off = make_run(tmp_path / "off", "off", 6.0, [0.0, 0.1, 0.2, 0.4, 0.5, 0.6])
    return sam, off


def test_summary_and_files(runs, tmp_path, capsys):
    assert main([*map(str, runs), "--output", str(tmp_path / "out")]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["rollout_speedup_total"] == pytest.approx(2.0)
    assert summary["rollout_speedup_tail"] == pytest.approx(2.0)
    assert summary["seconds"]["off"]["rollout"] == pytest.approx(36.0)
    assert summary["seconds"]["off"]["tail"] == pytest.approx(18.0)  # 3 of 6 equal engine steps, 6 times 6 s
    assert summary["accept_length"] == pytest.approx(14 / 5)
    assert summary["accept_rate"] == pytest.approx(9 / 15)
    # Replayed: four tokens a response; alone nothing repeats, and together no sample is ahead of its sibling.
    assert summary["accept_length_scope_request"] <= summary["accept_length_scope_group"]
    assert summary["reward_gain_sam"] == pytest.approx(0.5)
    assert summary["reward_gain_off"] == pytest.approx(0.4)
    assert (summary["identical_responses"], summary["total_responses"]) == (23, 24)
    assert summary["identical_by_step"]["4"] == [3, 4]
    assert summary["peak_memory_gib"] == 3.5
    page = (tmp_path / "out" / "report.html").read_text()
    assert "data:image/svg+xml;base64," in page and "http" not in page and "<script" not in page
    assert "<p>Rollout 2.00x speculation=off (36.0 s to 18.0 s in 6 steps)</p>" in page
    assert "23 of 24 responses identical, token for token" in page
    for picture in ("reward", "timeline", "acceptance_by_position", "acceptance_by_scope"):
        assert (tmp_path / "out" / f"{picture}.png").stat().st_size > 5000
    *ten, note, last = capsys.readouterr().out.splitlines()
    assert any("; scheduled sam synchronously, off asynchronously;" in line for line in ten)
    assert len(ten) == 10 and last.endswith("report.html")
    assert note.startswith("note: Stock vLLM was not measured: python -m recipe.against_stock ") and note[6:-1] in page


ROUNDS = {"stock": [3.0, 6.0, 3.0, 3.4], "off": [3.0, 7.5, 3.0, 3.4], "sam": [2.0, 4.0, 1.5, 2.0]}


def stock_beside(run, folder, seconds=ROUNDS, **changes):
    """stock.json of four rounds, one of which took all engines twice as long."""
    row = {"tokens_per_s": 100.0, "step_ms": 2.0, "acceptance_length": None}
    rows = {engine: {**row, "seconds": float(np.median(its))} for engine, its in seconds.items()}
    text = text_of(Run.load(run), [1, 3, 5])
    found = {"text": text, "steps": [1, 3, 5], "requests": 4, "seconds": seconds, "rows": rows, "settings": {}}
    folder.mkdir(exist_ok=True)
    AgainstStock(**found | {"date": "2026-01-01"} | changes).save(folder)


def test_stock_is_the_headline(runs, tmp_path, capsys):
    stock_beside(runs[0], tmp_path / "out")
    assert main([*map(str, runs), "--output", str(tmp_path / "out")]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["stock"]["over_stock"] == {"off": [1.0, 0.8, 1.0], "sam": [1.6, 1.5, 2.0]}
    assert summary["stock"]["verdict"] == "go"
    assert summary["stock"]["sam_over_off"] == [1.788, 1.5, 2.0] and summary["stock"]["rounds"] == 4
    page = (tmp_path / "out" / "report.html").read_text()
    headline = page.index("<p>Rollout 1.60x (1.50-2.00) as fast as stock vLLM</p>")
    assert headline < page.index("without drafts (off) 1.00x (0.80-1.00)") < page.index("2.00x speculation=off")
    assert page.index("2.00x speculation=off") < page.index("Engine alone, stock vLLM beside it") < page.index("<table")
    printed = capsys.readouterr().out
    assert printed.startswith("rollout over stock vLLM   off 1.00x (0.80-1.00), sam 1.60x (1.50-2.00), engine alone")
    assert "note: engines alone drafted with policy=goodput, the run with policy=None" in printed


def test_a_loss_is_said_in_the_headline(runs, tmp_path):
    seconds = {"stock": [1.0, 1.0, 1.0], "off": [1.0, 1.0, 1.0], "sam": [2.0, 2.0, 2.0]}
    stock_beside(runs[0], tmp_path / "out", seconds=seconds)
    assert main([*map(str, runs), "--output", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<p>Rollout 0.50x (0.50-0.50) as fast as stock vLLM: no-go</p>" in page


def test_stock_of_another_text_is_left_out(runs, tmp_path, capsys):
    stock_beside(runs[0], tmp_path / "out", text="0123456789abcdef")
    assert main([*map(str, runs), "--output", str(tmp_path / "out")]) == 0
    assert "stock.json is of another run's text and left out" in capsys.readouterr().out
    assert "<p>Rollout 2.00x speculation=off" in (tmp_path / "out" / "report.html").read_text()


def test_agreement_of_the_curves_and_the_published_percentages(runs, tmp_path):
    from recipe.report.tables import agreement, phases

    first, second = map(Run.load, runs)
    rows = {row[0]: row[1:] for row in agreement(first, second)}
    assert rows["entropy"] == (6, "0.1", "0.1", "+0 ± 0", "0", "1.000", "equal")
    steps, mean, other, difference, largest, p, verdict = rows["reward"]
    assert (steps, mean, other, largest) == (6, "0.35", "0.3", "0.1")
    assert difference == "+0.05 ± 0.022"  # of 0, 0, 0, 0.1, 0.1, 0.1: 0.0548 / sqrt(6)
    assert 0.2 < float(p) < 0.3 and verdict == "no difference found"  # 3 of 6 differ: 2 / 2**3
    table = {row[0]: row[1:] for row in phases(first, second)}
    assert table["rollout/seconds"] == (6, "3.00", "6.00", "50.00 %", "100.00 %")
    assert table["step"] == (6, "5.00", "5.00", "0.00 %", "0.00 %")
    main([*map(str, runs), "--output", str(tmp_path / "out")])
    for text in ((tmp_path / "out" / f"report.{ending}").read_text() for ending in ("md", "html")):
        assert "Whether the curves agree" in text and "saved, of the first (as published)" in text
    assert "| 4 | 0.5 | 0.4 | +0.1 | 9 | 9 | +0 | 3 of 4 |" in (tmp_path / "out" / "report.md").read_text()


def test_draft_tokens_by_source_over_training(runs, tmp_path):
    """Four steps were counted; what the earlier epoch brings grows, and a step without it has no acceptance of it."""
    metrics = runs[0] / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    for row, earlier in zip(rows[1:5], (0.0, 0.0, 0.5, 0.75), strict=True):
        row["rollout/spec_source_tokens"] = 100.0 * row["step"]
        for source in SOURCES:
            row[f"rollout/spec_source_share/{source}"] = 0.0
        row |= {"rollout/spec_source_share/own": 1 - earlier, "rollout/spec_source_accept_rate/own": 0.5}
        row["rollout/spec_source_share/earlier"] = earlier
        if earlier:
            row["rollout/spec_source_accept_rate/earlier"] = 0.8
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = map(Run.load, runs)
    assert by_source([first, second]) == [
        ("sam", "1 to 2", "own", "100.0 %", "0.50"),
        ("sam", "3 to 3", "own", "50.0 %", "0.50"),
        ("sam", "3 to 3", "earlier", "50.0 %", "0.80"),
        ("sam", "4 to 4", "own", "25.0 %", "0.50"),
        ("sam", "4 to 4", "earlier", "75.0 %", "0.80"),
    ]
    axes = new_figure(4, 3).subplots()
    draw_sources(axes, [first], None)
    own, earlier = axes.containers
    assert [bar.get_height() for bar in own] == pytest.approx([1, 1, 0.5, 0.25])
    assert [bar.get_y() + bar.get_height() for bar in earlier] == pytest.approx([1, 1, 1, 1])
    assert [text.get_text() for text in axes.get_legend().texts] == ["earlier, 0.80 right", "own, 0.50 right"]
    main([*map(str, runs), "--output", str(tmp_path / "out")])
    assert (tmp_path / "out" / "sources.png").stat().st_size > 5000
    text = (tmp_path / "out" / "report.md").read_text()
    assert "![Where drafts came from](sources.png)" in text
    assert "| sam | 4 to 4 | earlier | 75.0 % | 0.80 |" in text


def test_a_draft_models_acceptance_over_training_is_drawn(runs, tmp_path):
    metrics = runs[0] / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    for row in rows[1:]:
        row["rollout/spec_draft_model_accept_rate"] = 0.9 - 0.1 * row["step"]
    main([*map(str, runs), "--output", str(tmp_path / "before")])
    assert not (tmp_path / "before" / "draft_model.png").exists()
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    main([*map(str, runs), "--output", str(tmp_path / "after")])
    assert (tmp_path / "after" / "draft_model.png").stat().st_size > 5000
    assert "![The draft model over training](draft_model.png)" in (tmp_path / "after" / "report.md").read_text()


def test_curves_that_differ_are_called_different(tmp_path):
    from recipe.report.tables import agreement

    first = Run.load(make_run(tmp_path / "sam", "sam", 3.0, [0.1 * step for step in range(1, 11)]))
    second = Run.load(make_run(tmp_path / "off", "off", 6.0, [0.1 * step - 0.05 for step in range(1, 11)]))
    second.metrics[3]["actor/entropy"] = float("nan")
    assert {row[0]: row[1] for row in agreement(first, second)}["entropy"] == 9
    rows = {row[0]: row[-2:] for row in agreement(first, second)}
    assert rows["reward"][1] == "different" and float(rows["reward"][0]) < 0.01
    assert rows["response length"] == ("1.000", "equal")


def test_tables_in_the_published_form(runs):
    from recipe.report.tables import acceptance_over_training, published, tails

    first, second = map(Run.load, runs)
    for run, rounds in ((first, 1), (second, 2)):
        for step, row in run.metrics.items():
            if step:
                count = 1 if step == 1 else rounds
                row |= {"rollout/rounds": count, "rollout/round_seconds/replica_mean": row["rollout/seconds"] / count,
                        "rollout/spec_accept_length": 1.0 + step, "rollout/spec_accept_rate": 0.1 * step}  # fmt: skip
    rows = {row[0]: row[1:] for row in published(first, second)}
    assert rows["off, baseline"] == ("3.27", "6.00", "5.00")  # 36 s in 11 rounds
    assert rows["sam"] == ("3.00", "3.00", "5.00")
    assert rows["gain as published, (off - on) / on"] == ("9.09 %", "100.00 %", "0.00 %")
    assert rows["time saved, (off - on) / off"] == ("8.33 %", "50.00 %", "0.00 %")
    gains = [row[1:] for row in published(first, second) if "not ours" in row[0] and "gain as published" in row[0]]
    assert gains == [("10.02 %", "9.64 %", "8.13 %"), ("9.82 %", "11.52 %", "10.60 %"), ("", "10.59 %", "7.91 %")]
    assert all(name.startswith("published by cann-recipes-train, not ours") for name in list(rows)[4:])
    sam, off, other = tails([first, second])
    assert sam == ("sam", 2, "1.50", "50.0 %", "2.00x") and off == ("off", 2, "3.00", "50.0 %", "1.00x")
    assert other[0].endswith("not ours") and other[-1] == "1.35x"
    assert acceptance_over_training([first])[2] == ("sam", "5 to 6", "6.50", "0.55")


def test_how_the_engines_ran(runs, tmp_path):
    from recipe.report.tables import engines

    first, second = map(Run.load, runs)
    assert engines([first]) == [("sam", "synchronously", "", "", "", "")]  # of an earlier version
    for run, drafted in ((first, 30), (second, 0)):
        for step in run.steps:
            run.metrics[step] |= {"rollout/engine_steps": 100.0, "rollout/steps_with_drafts": float(drafted)}
    assert engines([first, second]) == [
        ("sam", "synchronously", 180, "no graphs", 420, "no graphs"),
        ("off", "asynchronously", 0, "", 600, "no graphs"),
    ]
    for step in first.steps:
        first.metrics[step]["rollout/graph_share/without_drafts"] = 0.9
        first.metrics[step]["rollout/graph_share/with_drafts"] = 0.5
    first.metrics[1] |= {"rollout/steps_with_drafts": 80.0, "rollout/graph_share/with_drafts": 1.0}
    assert first.graph_replay()["with_drafts"] == (230, pytest.approx((80 + 150 / 2) / 230))
    assert engines([first])[0][2:] == (230, "67.39 %", 370, "90.00 %")


def test_generation_rounds_are_phases_of_their_own(runs):
    from recipe.report.tables import phases

    first, second = map(Run.load, runs)
    for run, seconds in ((first, 2.0), (second, 5.0)):
        for step in (1, 2):
            run.metrics[step] |= {"rollout/round_seconds/1": seconds, "rollout/round_seconds/replica_mean": 1.0}
        run.metrics[2]["rollout/round_seconds/2"] = seconds / 2
    table = {row[0]: row[1:] for row in phases(first, second)}
    assert table["generation round 1"] == (2, "2.00", "5.00", "60.00 %", "150.00 %")
    assert table["generation round 2"][:3] == (1, "1.00", "2.50")
    assert not any("replica_mean" in name for name in table)


def test_broken_input_is_one_line(runs, tmp_path, capsys):
    assert main([str(runs[0]), str(tmp_path / "nowhere")]) == 2
    (tmp_path / "empty").mkdir()
    for name in ("config.yaml", "versions.json"):
        (tmp_path / "empty" / name).write_text((runs[0] / name).read_text())
    (tmp_path / "empty" / "metrics.jsonl").write_text('{"step": 0, "val": 1}\n')
    assert main([str(runs[0]), str(tmp_path / "empty")]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert "no metrics.jsonl there" in errors[0] and "no training step has finished" in errors[1]


@pytest.mark.parametrize(
    "running, tail",
    [
        ([1, 3, 5, 4, 2, 1], [0, 0, 0, 0, 1, 1]),
        ([5, 2, 1, 2, 4, 2], [0, 1, 0, 0, 0, 1]),  # the second round's way up is not tail
        ([5, 2, 1, 5, 1], [0, 1, 0, 0, 1]),
        ([2, 2, 1], [1, 1, 1]),
        ([5, 5], [0, 0]),
    ],
)
def test_tail(running, tail):
    assert EngineSteps(running=running).in_tail(2).astype(int).tolist() == tail


def test_config_difference():
    assert config_difference({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}, "d": 4}) == {
        "a.c": (2, 3),
        "d": (None, 4),
    }
