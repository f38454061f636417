"""Runs of wandb as the report reads them, from a server in memory."""

import json
import types

import pytest
import wandb

from recipe.report.page import RUNNING, main
from recipe.report.runs import ReportError, Run, load_run
from tests.recipe.report.test_report import REWARDS, make_run, pictures


def history(method, step):
    """What verl logs in a training step, as far as the report looks at it."""
    seconds = 3.0 if method == "sam" else 6.0
    return {
        "rollout/seconds": seconds, "rollout/tail_seconds": seconds / 2, "rollout/spec_verify_steps": 10.0 * step,
        "rollout/spec_accept_length": float(step) if method == "sam" else 1.0,
        "rollout/spec_drafted_tokens": 20.0 * (method == "sam"), "rollout/spec_accepted_tokens": 10.0,
        "rollout/reward_all/mean": 0.1 * step, "timing_s/step": 2 * seconds, "timing_s/gen": seconds + 1,
    }  # fmt: skip


def test_a_folder_of_wandb_names_the_run_directory_it_lies_in(tmp_path):
    directory = make_run(tmp_path / "sam", "sam", 3.0, REWARDS)
    folder = directory / "wandb" / "offline-run-20260101_000000-abc"
    folder.mkdir(parents=True)
    (log := folder / "run-abc.wandb").write_bytes(b"")
    for path in (directory / "wandb", folder, log):
        assert load_run(str(path)).directory == directory
    log.rename(tmp_path / "run-abc.wandb")
    with pytest.raises(ReportError, match="upload it with `wandb sync` first"):
        load_run(str(tmp_path / "run-abc.wandb"))


class Server:
    """What the report uses of wandb.Api."""

    asked: list = []

    def __init__(self, overrides=None, timeout=None):
        self.overrides = overrides

    def run(self, path):
        self.asked.append((path, self.overrides))
        if (method := path.split("/")[-1]) not in ("sam", "off", "new"):
            raise ValueError(f"Could not find run\n<Run {path}>")
        rows = [{"_step": 0, "_timestamp": 1.0, "val-core/task/acc/mean@1": 0.5}]
        steps = () if method == "new" else range(1, 7)
        rows += [{"_step": step, "actor/loss": "NaN", "flag": True, **history(method, step)} for step in steps]
        config = {"speculation": {"method": method, "batch_size_threshold": 2}}
        history_of = {"scan_history": lambda: iter(rows)}
        return types.SimpleNamespace(name=f"tiny_{method}", created_at="2026-01-01", config=config, **history_of)


@pytest.fixture(autouse=True)
def server(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(wandb, "Api", Server)
    monkeypatch.setattr(Server, "asked", [])


def test_runs_of_a_server_are_compared(tmp_path, capsys):
    """And one of a server with a run directory."""
    sam, off = "team/project/sam", "https://wandb.ai/team/project/runs/off?nw=me"
    directory = str(make_run(tmp_path / "sam", "sam", 3.0, REWARDS))
    assert main([directory, off]) == 0 and RUNNING in pictures((tmp_path / "report.html").read_text())
    assert json.loads((tmp_path / "summary.json").read_text())["rollout_speedup_tail"] == pytest.approx(2.0)
    capsys.readouterr()
    assert main([sam, off, "--output", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["rollout_speedup_total"] == summary["rollout_speedup_tail"] == pytest.approx(2.0)
    assert summary["accept_length"] == pytest.approx(sum(s * s for s in range(1, 7)) / sum(range(1, 7)))  # weighted
    assert summary["identical_responses"] is None and summary["agreement"]["reward"]["verdict"] == "equal"
    page = (tmp_path / "report.html").read_text()
    assert "<td>tail of the rollout</td><td>6</td><td>1.50</td><td>3.00</td><td>50.00 %</td>" in page
    assert "<p>Identical responses: not recorded.</p>" in page
    assert "Over training" in pictures(page) and RUNNING not in pictures(page)
    printed = capsys.readouterr().out
    assert "no responses in" in printed and "no engine steps in" in printed and "the tail is left out" not in printed
    found = load_run(sam).metrics
    assert found[1] == history("sam", 1) and found[0] == {"val-core/task/acc/mean@1": 0.5}


@pytest.mark.parametrize(
    "address, asked",
    [
        ("team/project/sam", ("team/project/sam", None)),
        ("team/project/runs/sam", ("team/project/sam", None)),
        ("https://wandb.ai/team/project/runs/sam/overview", ("team/project/sam", None)),
        ("https://forge.coreweave.com/wandb/team/project/runs/sam", ("team/project/sam", None)),
        ("http://wandb.here:8080/a-b/c.d/runs/sam", ("a-b/c.d/sam", {"base_url": "http://wandb.here:8080"})),
    ],
)
def test_addresses(address, asked):
    assert load_run(address).steps == list(range(1, 7))
    assert Server.asked == [asked]


def test_what_cannot_be_read_is_one_line(monkeypatch, tmp_path, capsys):
    def error(*runs):
        assert main(list(runs)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "wandb says: Could not find run <Run team/project/gone>" in error("team/project/gone", "team/project/off")
    assert "no training step has finished there" in error("team/project/new", "team/project/off")
    (tmp_path / "nothing").mkdir()
    line = error(str(tmp_path / "nothing"), "team/project/off")
    assert "nothing: no metrics.jsonl there" in line and "entity/project/run_id" in line
    monkeypatch.delenv("WANDB_API_KEY")
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    line = error("outputs/quickstart/smm", "team/project/off")
    assert line.startswith("error: outputs/quickstart/smm: no such folder, and no key") and "wandb login" in line


def test_a_run_of_plain_verl_is_compared_by_what_it_has(monkeypatch, tmp_path, capsys):
    """No speculation in its config, and none of this recipe's metrics."""
    theirs = {step: {"timing_s/gen": 8.0, "timing_s/step": 10.0, "critic/score/mean": 0.1} for step in range(1, 5)}
    ours = {step: {**history("sam", step), "critic/score/mean": 0.1} for step in range(1, 7)}
    runs = {
        "ours": Run("sam", "ours", {"speculation": {"method": "sam"}}, {}, ours),
        "theirs": Run("their name", "theirs", {}, {}, theirs),
    }
    monkeypatch.setattr("recipe.report.page.load_run", runs.__getitem__)
    monkeypatch.setattr("recipe.report.page.draw_all", lambda runs: {})
    assert main(["ours", "theirs", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Rollout 2.00x speculation=their name (32.0 s to 24.0 s in 4 steps)")  # verl's clock
    assert "the tail is left out" in printed and "rollout time is verl's timing_s/gen" in printed
    assert "<td>reward, groups trained on</td><td>4</td>" in (tmp_path / "report.html").read_text()
