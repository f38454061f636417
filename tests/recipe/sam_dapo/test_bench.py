"""`sam bench --run`: what engines are told of a run, and what is kept of their answer; `sam bench --config-name`: whole
runs in turn. Engines and trainings are stand-ins."""

import functools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from recipe.sam_dapo import bench
from recipe.sam_dapo.bench import main
from recipe.sam_dapo.launch import config
from recipe.sam_dapo.report.page import main as report
from recipe.sam_dapo.report.runs import Run, load_stock, rows_of
from sam.tools.bench import engines
from sam.tools.bench.engines import EngineProcess
from tests.recipe.sam_dapo.run_directory import write_run
from tests.sam.tools.bench.test_command import FAKE_ENGINE

STEPS = 4
VARIANTS = ["speculation=suffix", "speculation=sam speculation.scope=history"]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of four steps with two rounds of two prompts each, with a trained drafter; the first step lacks a response.

    Engines are fake: tests/end_to_end/test_endings.py has real ones, with sam.
    """
    model, directory = tmp_path / "assets" / "model", tmp_path / "runs" / "hybrid"
    for folder in (model, draft := tmp_path / "draft"):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 640, "vocab_size": 100}))
    overrides = [f"assets={tmp_path / 'assets'}", "actor_rollout_ref.rollout.n=2", f"run_dir={directory}"]
    overrides += ["speculation.method=hybrid", f"speculation.draft_model={draft}", "speculation.policy=threshold"]
    composed = OmegaConf.to_container(config.compose_config("dapo_tiny_cpu", overrides), resolve=True)
    responses = {
        step: [
            {"prompt": 4 * step + prompt, "sample": sample, "round": prompt // 2,
             "prompt_tokens": [step, prompt], "response_tokens": [prompt, sample, step]}
            for prompt in range(4) for sample in range(2)
        ][step == 1 :]
        for step in range(1, STEPS + 1)
    }  # fmt: skip
    write_run(directory, composed, [{"step": step, "rollout/seconds": 1.0} for step in responses], responses)
    program = (sys.executable, str(FAKE_ENGINE))
    monkeypatch.setattr(engines, "EngineProcess", functools.partial(EngineProcess, program=program))
    fake = {"seconds": {"stock": 3.0, "off": 2.5, "hybrid": 2.0}, "folder": str(tmp_path)}
    for name, value in {"FAKE": json.dumps(fake), "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}.items():
        monkeypatch.setenv(name, value)  # and what the command sets is undone
    monkeypatch.setattr("recipe.sam_dapo.launch.environment.CPU", {})
    monkeypatch.setattr("recipe.sam_dapo.report.pictures.CURVES", ())  # which take seconds
    return directory


def test_engines_emit_the_text_of_a_run_and_its_report_says_so(run, tmp_path, capsys):
    assert main(["--run", str(run), "--rounds", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("engine alone: stock vLLM 3.0")
    assert "off 2.50 s, 1.20x (1.20-1.20); hybrid 2.00 s, 1.50x (1.50-1.50) (2 rounds of 2 requests" in printed
    found, note = load_stock(tmp_path / "runs", Run.load(run))
    assert found["steps"] == [1, 3, 4] and list(rows_of(found)) == ["stock", "off", "hybrid"]
    assert note == "engines alone drafted with policy=goodput, the run with policy=threshold"
    # A round is a generation round, however small.
    assert (found["settings"]["seeds"], found["settings"]["responses"]) == (False, 1)
    assert report([str(run)]) == 0
    assert "on this run's responses: hybrid 1.50x (1.50-1.50) as fast as stock vLLM: " in capsys.readouterr().out
    (run / "rollouts" / "4.jsonl").write_text((run / "rollouts" / "3.jsonl").read_text())
    assert report([str(run)]) == 0
    printed = capsys.readouterr().out
    assert "stock.json is of another run's text and left out" in printed and "as fast as stock vLLM" not in printed
    assert main(["--run", str(run), "--rounds", "1"]) == 0, "a second measurement replaces the first"


def test_what_cannot_be_compared_is_one_line(run, capsys):
    def error():
        assert main(["--run", str(run)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    config = OmegaConf.load(run / "config.yaml")
    del config.machine.threads
    OmegaConf.save(config, run / "config.yaml")
    assert "its config.yaml lacks machine.threads, it is an older version's" in error()
    (run / "rollouts" / "1.jsonl").unlink()
    assert "no responses recorded there" in error()
    config.speculation.method = "off"
    OmegaConf.save(config, run / "config.yaml")
    assert "its speculation is off" in error()


def write_trained(directory, other):
    """A finished run of a step, whose folder says round and variant: the second takes half as long."""
    round_, variant = (int(part[-1]) for part in directory.parts[-2:])
    counts = dict.fromkeys((f"rollout/spec_{name}_tokens" for name in ("drafted", "accepted")), 5.0)
    row = {"step": 1, "rollout/seconds": 6.0 * round_ / variant, "rollout/spec_verify_steps": 2.0, **counts}
    response = {"prompt": 0, "sample": 0, "prompt_tokens": [1], "response_tokens": [int(other)]}
    write_run(directory, {"speculation": {"method": "sam"}}, [row], {1: [response]})
    (directory / "state.json").write_text(json.dumps({"phase": "finished"}))


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """Runs the command; returns its exit code and the trainings that it started."""

    def run(*variants, code=0, other=None):
        started = []

        def train(command, stdout):
            assert stdout is None
            started.append(command)
            directory = Path(next(word for word in command if word.startswith("run_dir="))[8:])
            if not code:
                write_trained(directory, directory.name == other)
            return SimpleNamespace(returncode=code)

        monkeypatch.setattr(bench.subprocess, "run", train)
        words = ["--config-name", "dapo_tiny_cpu", "--output", str(tmp_path), "--rounds", "3", "--variants", *variants]
        return bench.main(words), started

    return run


def test_runs_take_turns_and_are_compared_with_the_first_of_their_round(compare, tmp_path, capsys):
    code, started = compare(*VARIANTS)
    first_words = [next(word for word in command if word.startswith("speculation")) for command in started]
    sam, suffix = "speculation=sam", "speculation=suffix"
    assert code == 0 and first_words == [suffix, sam, sam, suffix, suffix, sam]
    assert "speculation.scope=history" in started[1]
    text = capsys.readouterr().out
    *_, header, _, line = text.splitlines()
    assert header.split()[-2:] == ["3", "rounds"] and line.lstrip().startswith(VARIANTS[1])
    assert line.split()[2:] == ["6.00", "(3.00-9.00)", "3.50", "2.00x", "(2.00-2.00)", "go"]
    peer, ours = json.loads((tmp_path / "result.json").read_text())
    assert peer["seconds"] == [6.0, 12.0, 18.0] and ours["seconds"] == [3.0, 6.0, 9.0]
    assert peer["ratio"] == 1.0
    assert compare(*VARIANTS) == (0, []), "finished runs are not repeated"


@pytest.mark.parametrize(
    ("variants", "training", "code", "said"),
    [
        (["a", "a"], {}, 2, "expected two or more, all different"),
        (VARIANTS, {"code": 3}, 1, "the run ended with exit code 3"),
        (VARIANTS, {"other": "variant_2"}, 1, "round_1/variant_2: other steps or responses than"),
    ],
)
def test_runs_that_cannot_be_compared_are_one_line(compare, capsys, variants, training, code, said):
    assert compare(*variants, **training)[0] == code
    assert said in capsys.readouterr().err.splitlines()[-1]
