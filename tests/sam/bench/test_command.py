"""`python -m sam.bench` with processes that speak its protocol without an engine."""

import functools
import json
import os
import sys
import time
from pathlib import Path

import pytest

from sam.bench import __main__ as command
from sam.bench import rounds
from sam.bench.__main__ import main
from sam.bench.engine_process import EngineProcess
from sam.bench.prompts import check_draft_model

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
HEAD = {"architectures": ["LlamaForCausalLMEagle3"]}  # what an EAGLE3 head's config.json says


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Runs the command on fake engines; returns its exit code."""
    model, prompts = tmp_path / "model", tmp_path / "prompts.jsonl"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"max_position_embeddings": 64, "vocab_size": 100}))
    prompts.write_text("".join(json.dumps({"prompt_token_ids": [number, 2]}) + "\n" for number in range(20)))
    program = (sys.executable, str(FAKE_ENGINE))
    monkeypatch.setattr(command, "EngineProcess", functools.partial(EngineProcess, program=program))
    monkeypatch.setattr(rounds, "REST_SECONDS", 0.0)

    def run(*arguments, model=model, prompts=prompts, **fake):
        seconds = {"stock": 1.0, "off": 0.95, "sam": 0.7} | fake.pop("seconds", {})
        monkeypatch.setenv("FAKE", json.dumps({"seconds": seconds, "leaves": str(tmp_path / "pids"), **fake}))
        asked = ["--prompts", prompts] if prompts else []
        common = ["--model", model, *asked, "--output", tmp_path / "out", "--max-tokens", 16]
        return main([*map(str, common), "--requests", "1", "4", *arguments])

    return run


def nothing_is_left(tmp_path):
    """Whether all processes that the engines started are gone, or are within a few seconds."""
    stats = [Path(f"/proc/{pid}/stat") for pid in (tmp_path / "pids").read_text().split()]
    for _ in range(100):
        if not (stats := [stat for stat in stats if stat.is_file() and ") Z " not in stat.read_text()]):
            return True
        time.sleep(0.05)
    return False


def test_a_measurement(bench, tmp_path, capsys):
    assert bench("--dtype", "float32") == 0
    text = capsys.readouterr().out
    assert "go: 1.43x (1.43-1.43) at 1 request\ngo: 1.43x (1.43-1.43) at 4 requests\nspeculation=sam " in text
    assert text.count("24 of 24") == 4  # 3 rounds of 8 responses at each load; stock has other tokens
    assert "batches of a round, one after another: 8 of 1 request, 2 of 4 requests\n" in text
    assert "prompts.jsonl has 20 prompts or groups, all rounds need 32: some come again" in text
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["settings"]["engine"] == ["--dtype", "float32"]
    assert result["verdicts"]["4"]["answer"] == "go" and result["rows"][2]["acceptance_length"] == 2.0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "bench.html", "off.log", "recorded", "result.json", "rounds.jsonl", "sam.log", "stock.log",
    }  # fmt: skip
    assert (tmp_path / "out" / "sam.log").read_text() == "this is sam\n"
    recorded = sorted(path.name for path in (tmp_path / "out" / "recorded").iterdir())
    assert recorded == sorted(f"{load}-{variant}.json" for load in (1, 4) for variant in ("stock", "off", "sam"))
    page = (tmp_path / "out" / "bench.html").read_text()
    assert page.index("go: 1.43x") < page.index("speculation=sam") < page.index("<figure>") < page.index("<table>")
    assert "title='draft: 9 8 '" in page and page.count("<figure>") == 1 + 1 + 1 + 2
    assert nothing_is_left(tmp_path)


def test_forced_text(bench, tmp_path, capsys):
    recording = tmp_path / "rollouts.jsonl"
    rows = [{"prompt_tokens": [n], "response_tokens": [n] * (20 + i)} for n in range(3) for i in range(4 if n else 3)]
    recording.write_text("".join(json.dumps(row) + "\n" for row in rows))
    forced = ["--text", str(recording), "--samples", "4"]
    assert bench(*forced, "--rounds", "1", prompts=None) == 0
    text = capsys.readouterr().out
    assert "1 of 3 prompts have fewer than 4 responses and are left out" in text
    assert "has 2 prompts or groups, all rounds need 12: some come again" in text  # a batch each, and then 8 and 2
    assert "all requests emit the responses of rollouts.jsonl" in text and "8 of 8" in text
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["settings"]["max_tokens"] == 16 and result["settings"]["ignore_eos"]  # --max-tokens cuts
    assert {row["as_recorded"] for row in result["rows"]} == {8}
    assert not result["settings"]["seeds"]  # they would change no token, and slow stock down on a CPU


@pytest.mark.parametrize(
    "rows, message",
    [
        (None, "text.jsonl: no such file"),
        ([], "no token of a response in it"),
        ([([1], [])], "no token of a response in it"),
        ([([1], [2])], "text.jsonl: its largest group has 1 responses, --samples 8 needs 4: set --samples 1 or less"),
        ([([1], [100])] * 4, "a response to prompt 1 has token 100, the model knows 0 to 99"),
        ([([1] * 60, [2] * 9)] * 4, "prompt 1 has 60 tokens, with 9 of a response that is more than the 64"),
    ],
)
def test_a_recording_that_does_not_fit(bench, tmp_path, capsys, monkeypatch, rows, message):
    monkeypatch.setattr(command, "EngineProcess", lambda *_, **__: pytest.fail("an engine was started"))
    path = tmp_path / "text.jsonl"
    if rows is not None:
        path.write_text("".join(json.dumps({"prompt_tokens": p, "response_tokens": r}) + "\n" for p, r in rows))
    assert bench("--text", str(path), prompts=None) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert message in error


def test_text_and_prompts(bench, capsys):
    assert bench("--text", "x.npz") == 2
    assert capsys.readouterr().err == "error: --text has its own prompts: leave --prompts out\n"


def test_a_slowed_sam_is_a_no_go(bench, capsys):
    assert bench(seconds={"sam": 1.1}) == 0
    text = capsys.readouterr().out
    assert "no-go: 0.91x (0.91-0.91) at 1 request\nno-go: 0.91x" in text and "\nspeculation=off" in text


def test_json_is_all_that_is_printed(bench, capsys):
    assert bench("--json", "--rounds", "1") == 0
    assert json.loads(capsys.readouterr().out)["lines"][0].startswith("too noisy to tell")


def test_more_rounds_later(bench, tmp_path, capsys):
    assert bench("--rounds", "1") == 0
    assert "(--rounds 4 --resume)" in capsys.readouterr().out
    assert bench("--rounds", "4", "--resume") == 0
    assert "go: 1.43x" in capsys.readouterr().out
    assert len((tmp_path / "out" / "rounds.jsonl").read_text().splitlines()) == 1 + 4 * 2
    before = (tmp_path / "pids").read_text()
    assert bench("--rounds", "4", "--resume") == 0  # nothing is missing: no engine is started
    assert (tmp_path / "pids").read_text() == before
    capsys.readouterr()
    for setting in ("samples", "responses"):
        assert bench("--resume", f"--{setting}", "2") == 2
        assert f"{setting} was 8, now 2" in capsys.readouterr().err


def test_ctrl_c_keeps_what_is_measured(bench, tmp_path, capsys, monkeypatch):
    class Interrupted(EngineProcess):
        asked = 0

        def ask(self, words):
            Interrupted.asked += 1
            if Interrupted.asked == 3 + 6 + 24 + 2:  # starts, warm-ups, the first load's round, a batch, and then
                raise KeyboardInterrupt
            return super().ask(words)

    program = command.EngineProcess.keywords["program"]
    monkeypatch.setattr(command, "EngineProcess", functools.partial(Interrupted, program=program))
    assert bench() == 130
    text = capsys.readouterr().out
    assert "at 1 request" in text and "at 4 requests" not in text and "--resume" in text
    assert nothing_is_left(tmp_path)
    assert bench("--resume") == 0
    assert "go: 1.43x (1.43-1.43) at 4 requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    "fake, message",
    [
        ({"refuses": "off"}, "off: unrecognized arguments: --wings: see"),
        ({"dies": "sam"}, "sam: the engine's process ended with code 3: see"),
        ({"dies_at_run": "off"}, "off: the engine's process ended with code 9: see"),
        ({"longest_text": 10}, "a prompt with its response has up to 18 tokens, more than the engine takes, 10"),
    ],
)
def test_an_engine_that_refuses_or_dies_ends_all(bench, tmp_path, capsys, fake, message):
    assert bench(**fake) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(error) == 1 and message in error[0]
    if "see" in message:
        assert f"{tmp_path / 'out'}" in error[0] and error[0].endswith(".log")
    assert nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--variants", "stock", "eagle"], "--variants eagle"),
        (["--variants", "stock", "hybrid"], "--variants hybrid: it needs --draft-model DIR, the folder of a draft"),
        (["--rounds", "0"], "--rounds 0: expected 1 or more"),
        (["--responses", "0"], "--responses 0: expected 1 or more"),
        (["--requests", "few"], "argument --requests: invalid int value: 'few'"),
        (["--max-tokens", "63"], "prompt 1 has 2 tokens, with --max-tokens 63 that is more than the 64"),
        (["--max-model-len", "8"], "more than the 8 that the model takes"),
        (["--requests", "500"], "20 prompts, 500 requests of 8 samples each need 63"),
        (["--draft-tokens", "99"], "num_speculative_tokens=99"),
        (["oops"], "oops: expected an option"),
        (["--speculative-config", "{}"], "the variants set it"),
    ],
)
def test_bad_input_is_one_line_before_an_engine_starts(bench, tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(command, "EngineProcess", lambda *_, **__: pytest.fail("an engine was started"))
    assert bench("--temperature", "1", *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "config, message",
    [
        (None, "no config.json there; expected the folder of a model"),
        ({"vocab_size": 99}, "its vocab_size is 99, the model's is 100: make one for this model"),
    ],
)
def test_a_draft_model_that_does_not_fit(bench, tmp_path, capsys, monkeypatch, config, message):
    monkeypatch.setattr(command, "EngineProcess", lambda *_, **__: pytest.fail("an engine was started"))
    (draft := tmp_path / "draft").mkdir()
    if config is not None:
        (draft / "config.json").write_text(json.dumps(config))
    assert bench("--variants", "off", "hybrid", "--draft-model", str(draft)) == 2
    assert capsys.readouterr().err == f"error: --draft-model {draft}: {message}\n"


@pytest.mark.parametrize(
    "variants, sign, message",
    [
        (["draft_model"], HEAD, "an EAGLE3 head, --variants draft_model expects a draft model: take another folder"),
        (["eagle3"], {}, "no EAGLE3 head, --variants eagle3 expects a head: take another folder, or draft_model or"),
        (["hybrid", "draft_model", "eagle3"], HEAD, "an EAGLE3 head, --variants draft_model expects"),
    ],
)
def test_another_kind_of_drafter(bench, tmp_path, capsys, monkeypatch, variants, sign, message):
    monkeypatch.setattr(command, "EngineProcess", lambda *_, **__: pytest.fail("an engine was started"))
    (draft := tmp_path / "draft").mkdir()
    (draft / "config.json").write_text(json.dumps({"vocab_size": 100} | sign))
    assert bench("--variants", "off", *variants, "--draft-model", str(draft)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --draft-model {draft}: holds {message}") and error.count("\n") == 1


@pytest.mark.parametrize("variants, sign", [(["eagle3", "hybrid"], HEAD), (["draft_model", "hybrid"], {})])
def test_the_right_kind_of_drafter(tmp_path, variants, sign):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 100} | sign))
    check_draft_model(tmp_path, {"vocab_size": 100}, ["off", *variants])


def test_a_head_takes_part_to_the_page(bench, tmp_path):
    (head := tmp_path / "head").mkdir()
    (head / "config.json").write_text(json.dumps({"vocab_size": 100} | HEAD))
    assert bench("--variants", "off", "eagle3", "--draft-model", str(head), seconds={"eagle3": 0.5}) == 0
    assert "eagle3" in (tmp_path / "out" / "bench.html").read_text()


def test_a_draft_model_takes_part(bench, tmp_path, capsys):
    (draft := tmp_path / "draft").mkdir()
    (draft / "config.json").write_text(json.dumps({"vocab_size": 100}))
    variants = ["--variants", "off", "sam", "draft_model", "hybrid"]
    assert bench(*variants, "--draft-model", str(draft), seconds={"draft_model": 0.8, "hybrid": 0.5}) == 0
    text = capsys.readouterr().out
    assert "draft_model" in text and text.count("24 of 24") == 8  # identical tokens, off itself included
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["settings"]["draft_model"] == str(draft)
    ratios = {row["variant"]: row["ratio"] for row in result["rows"] if row["requests"] == 4}
    assert ratios["hybrid"] > ratios["sam"] > ratios["draft_model"] > ratios["off"]
    assert "hybrid" in (tmp_path / "out" / "bench.html").read_text()


def test_no_model_and_no_prompts(bench, tmp_path, capsys):
    (tmp_path / "empty.jsonl").write_text("\n")
    assert bench(model=tmp_path / "nowhere") == bench(prompts=tmp_path / "empty.jsonl") == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("nowhere: no config.json there; expected the folder of a model")
    assert second.endswith("empty.jsonl: no prompts in it")


def test_suffix_without_its_package(bench, capsys, monkeypatch):
    find_spec = importlib_find_spec()
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "arctic_inference" else find_spec(name)
    )
    assert bench("--variants", "stock", "suffix") == 2
    assert capsys.readouterr().err == (
        "error: --variants suffix: it needs arctic-inference: install the extra `peers`, or leave it out\n"
    )


def importlib_find_spec():
    import importlib.util

    return importlib.util.find_spec


def test_a_process_that_does_not_answer_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("sam.bench.engine_process.STOP_SECONDS", 0.1)
    program = (sys.executable, "-c", "import time; time.sleep(600)")
    engine = EngineProcess("off", tmp_path / "off.log", dict(os.environ), program)
    pid = engine._process.pid
    engine.stop()
    engine.stop()
    assert not Path(f"/proc/{pid}").exists()
