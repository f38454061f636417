"""Runs of wandb as the report reads them, from a server in memory."""

import json
import types

import pytest
import wandb
from omegaconf import OmegaConf

from recipe.launch import environment
from recipe.report import wandb_reader
from recipe.report.__main__ import main
from recipe.report.runs import ReportError, Run
from recipe.report.wandb_reader import load_run
from tests.recipe.report import test_report


def speculation(method):
    return {"method": method, "verification": "exact", "policy": "threshold", "num_speculative_tokens": 3,
            "batch_size_threshold": 2}  # fmt: skip


def history(method, step):
    """What verl logs in a training step, as far as the report looks at it."""
    seconds = 3.0 if method == "sam" else 6.0
    return {
        "rollout/seconds": seconds, "rollout/tail_seconds": seconds / 2, "rollout/tail_share": 0.5,
        "rollout/rounds": 2.0, "rollout/round_seconds/1": seconds / 3, "rollout/round_seconds/2": 2 * seconds / 3,
        "rollout/round_seconds/replica_mean": seconds / 2, "rollout/spec_verify_steps": 10.0 * step,
        "rollout/spec_accept_length": float(step) if method == "sam" else 1.0, "rollout/spec_accept_rate": 0.5,
        "rollout/spec_drafted_tokens": 20.0 * (method == "sam"), "rollout/spec_accepted_tokens": 10.0,
        "rollout/reward_all/mean": 0.1 * step, "rollout/acc_all/mean": 0.5, "response_length/mean": 9.0 + step,
        "timing_s/step": 2 * seconds, "timing_s/gen": seconds + 1, "actor/entropy": 0.1, "actor/grad_norm": 1.0,
    }  # fmt: skip


def test_wandb_reads_name_group_and_tags_from_the_environment(tmp_path, monkeypatch):
    config = {"config_name": "tiny", "seed": 3, "speculation": speculation("sam"), "trainer": {"device": "cpu"}}
    for variable, value in environment.wandb_labels(OmegaConf.create(config)).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    settings = wandb.Settings(mode="offline", console="off", x_disable_stats=True)
    with wandb.init(project="reports", name="tiny_sam", config=config, settings=settings) as run:
        assert (run.name, run.group, run.job_type) == ("tiny_sam", "tiny_seed3", "sam")
        assert sorted(run.tags) == sorted("speculation=sam verification=exact k=3 policy=threshold device=cpu".split())
    wandb.teardown()  # its service, and what it has of this environment


def test_a_folder_of_wandb_names_the_run_directory_it_lies_in(tmp_path):
    directory = test_report.make_run(tmp_path / "sam", "sam", 3.0, [0.1 * step for step in range(1, 7)])
    folder = directory / "wandb" / "offline-run-20260101_000000-abc"
    folder.mkdir(parents=True)
    log = folder / "run-abc.wandb"
    log.write_bytes(b"")
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
        method = path.split("/")[-1]
        if method not in ("sam", "off"):
            raise ValueError(f"Could not find run\n<Run {path}>")
        rows = [{"_step": 0, "_timestamp": 1.0, "val-core/task/acc/mean@1": 0.5}]
        rows += [{"_step": step, "actor/loss": "NaN", "flag": True, **history(method, step)} for step in range(1, 7)]
        return types.SimpleNamespace(
            name=f"tiny_{method}", created_at="2026-01-01", config={"speculation": speculation(method)},
            scan_history=lambda: iter(rows),
        )  # fmt: skip


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(wandb, "Api", Server)
    monkeypatch.setattr(Server, "asked", [])


def test_two_runs_of_a_server_are_compared(server, tmp_path, capsys):
    runs = ["team/project/sam", "https://wandb.ai/team/project/runs/off?nw=me"]
    assert main([*runs, "--output", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["rollout_speedup_total"] == pytest.approx(2.0)
    assert summary["rollout_speedup_tail"] == pytest.approx(2.0)
    assert summary["accept_length"] == pytest.approx(sum(s * s for s in range(1, 7)) / sum(range(1, 7)))  # weighted
    assert summary["identical_responses"] is None and summary["peak_memory_gib"] is None
    assert summary["agreement"]["reward"]["verdict"] == "equal"
    text = (tmp_path / "report.md").read_text()
    assert "| gain as published, (off - on) / on | 100.00 % | 100.00 % | 100.00 % |" in text
    assert "| sam | 2 | 1.50 | 50.0 % | 2.00x |" in text
    assert "| generation round 2 | 6 | 2.00 | 4.00 | 50.00 % | 100.00 % |" in text
    assert (tmp_path / "acceptance_over_training.png").exists() and not (tmp_path / "timeline.png").exists()
    printed = capsys.readouterr().out
    assert "no responses in" in printed and "no engine steps in" in printed and "the tail is left out" not in printed
    row = load_run(runs[0]).metrics[1]
    assert "actor/loss" not in row and "flag" not in row and "_timestamp" not in row
    assert load_run(runs[0]).metrics[0] == {"val-core/task/acc/mean@1": 0.5}


def test_a_run_directory_is_compared_with_a_run_of_a_server(server, monkeypatch, tmp_path):
    monkeypatch.setattr("recipe.report.__main__.replay_scopes", lambda run: {})  # compiles kernels
    directory = test_report.make_run(tmp_path / "sam", "sam", 3.0, [0.1 * step for step in range(1, 7)])
    assert main([str(directory), "team/project/off"]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["rollout_speedup_tail"] == pytest.approx(2.0)
    assert (tmp_path / "timeline.png").exists() and not (tmp_path / "identical.png").exists()


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
def test_addresses(server, address, asked):
    assert load_run(address).steps == list(range(1, 7))
    assert Server.asked == [asked]


def test_what_cannot_be_read_is_one_line(server, monkeypatch, tmp_path, capsys):
    def error(*runs):
        assert main(list(runs)) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "wandb says: Could not find run <Run team/project/gone>" in error("team/project/gone", "team/project/off")
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
        "ours": Run("sam", "ours", {"speculation": speculation("sam")}, {}, ours),
        "theirs": Run("their name", "theirs", {}, {}, theirs),
    }
    monkeypatch.setattr("recipe.report.__main__.load_run", runs.__getitem__)
    assert main(["ours", "theirs", "--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "rollout speed-up, total   2.00x over 4 steps" in printed  # 8 s against 3 + 1 s, verl's clock in both
    assert "rollout speed-up, tail    not recorded" in printed and "rollout time is verl's timing_s/gen" in printed
    assert "reward, groups trained on | 4 | 0.1 | 0.1" in (tmp_path / "report.md").read_text()


def test_a_run_that_has_not_trained_is_one_line(server, monkeypatch, capsys):
    monkeypatch.setattr(wandb_reader, "numbers", lambda row: {})
    assert main(["team/project/sam", "team/project/off"]) == 2
    assert "no training step has finished there" in capsys.readouterr().err
