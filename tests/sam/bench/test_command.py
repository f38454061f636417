"""`sam bench --model` with processes that speak its protocol without an engine."""

import functools
import json
import os
import sys
import time
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

from sam.bench import engines
from sam.bench.engines import EngineProcess, environment_of
from sam.bench.result import GO, NO_GO, NOISY, compared
from sam.bench.settings import parse
from sam.config import HUGE_PAGES, SpeculationConfig
from sam_recipe.bench import main

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")


@pytest.fixture
def bench(tmp_path, monkeypatch):
    """Runs the command on fake engines; returns its exit code."""
    for name in ("model", "engines"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 100}}))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": [number, 2]}) + "\n" for number in range(80)))
    program = (sys.executable, str(FAKE_ENGINE))
    monkeypatch.setattr(engines, "EngineProcess", functools.partial(EngineProcess, program=program))
    for name in ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments, prompts=prompts, **fake):
        times = {"stock": 1.0, "off": 0.95, "sam": 0.7, "sam-k2": 0.8}
        monkeypatch.setenv("FAKE", json.dumps({"seconds": times, "folder": str(tmp_path / "engines"), **fake}))
        asked = ["--prompts", prompts] if prompts else []
        words = ["--model", tmp_path / "model", *asked, "--output", tmp_path / "out", "--max-tokens", "16"]
        try:
            return main([*map(str, words), "--requests", "1", "4", "--temperature", "1", *arguments])
        except SystemExit as ended:
            return ended.code

    return run


def notes_of(tmp_path, variant):
    return [json.loads(line) for line in (tmp_path / "engines" / f"{variant}.jsonl").read_text().splitlines()]


def nothing_is_left(tmp_path):
    """Whether all processes that the engines started are gone, or are within a few seconds."""
    pids = {note["left"] for path in (tmp_path / "engines").iterdir() for note in notes_of(tmp_path, path.stem)[:1]}
    stats = [Path(f"/proc/{pid}/stat") for pid in pids]
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
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["settings"]["engine"][:2] == ["--dtype", "float32"] and result["settings"]["seeds"]
    assert [row["answer"] for row in result["rows"]] == ["no-go", "go", "go"] * 2
    assert result["rows"][2]["acceptance_length"] == 2.0
    logs = {"off.log", "sam.log", "stock.log"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == logs | {
        "result.json",
        "rounds.jsonl",
    } and nothing_is_left(tmp_path)
    # All variants get the same requests, new ones in every run: warm-ups of one batch, then by round and load as many
    # batches as give eight responses.
    asked = ([note["batches"] for note in notes_of(tmp_path, one) if "batches" in note] for one in ("off", "sam"))
    stock = [note["batches"] for note in notes_of(tmp_path, "stock") if "batches" in note]
    sizes = [[len(batch) for batch in run] for run in stock]
    assert list(asked) == [stock] * 2 and sizes == [[1], [4], *[[1] * 8, [4] * 2] * 3]
    batches = [batch for run in stock for batch in run]
    prompts = [{tuple(request["prompt_token_ids"]) for request in batch} for batch in batches]
    assert len(set.union(*prompts)) == sum(map(len, prompts)), "no batch repeats another one's prompt"
    seeds = [request["seed"] for batch in batches for request in batch]
    assert len(set(seeds)) == len(seeds)
    assert bench() == 2 and "result.json is there already: name another --output" in capsys.readouterr().err


def test_ctrl_c_keeps_what_is_measured(bench, tmp_path, capsys, monkeypatch):
    class Interrupted(EngineProcess):
        replies = 0

        def ask(self, command):
            Interrupted.replies += 1
            if Interrupted.replies == 3 + 6 + 3 + 2:  # starts, warm-ups, the first load's round, and then
                raise KeyboardInterrupt
            return super().ask(command)

    program = engines.EngineProcess.keywords["program"]
    monkeypatch.setattr(engines, "EngineProcess", functools.partial(Interrupted, program=program))
    assert bench() == 130
    text = capsys.readouterr().out
    assert "too noisy to tell: 1.43x (1.43-1.43) at 1 request: use --rounds 4" in text
    assert "x at 4 requests" not in text and nothing_is_left(tmp_path)


@pytest.mark.parametrize(
    ("fake", "message", "measured"),
    [
        ({"refuses": "sam-k2"}, "sam-k2: unrecognized arguments: --wings: see", 0),
        ({"dies": ["sam-k2", 3]}, "sam-k2: the engine's process ended with code 9: see", 1),
    ],
)
def test_an_engine_that_fails_ends_it_and_what_is_measured_stays(bench, tmp_path, capsys, fake, message, measured):
    assert bench("--variants", "stock", "sam-k2", **fake) == 2
    text, error = capsys.readouterr()
    (line,) = [line for line in error.splitlines() if line.startswith("error: ")]
    assert message in line and line.endswith("sam-k2.log") and nothing_is_left(tmp_path)
    assert ("1.25x" in text) == (tmp_path / "out" / "result.json").exists() == bool(measured)


def test_a_measurement_that_was_ended_goes_on(bench, tmp_path, capsys):
    words = ("--variants", "stock", "sam-k2", "--rounds", "2")
    assert bench(*words, dies=["sam-k2", 4]) == 2  # after both loads' warm-up and first round
    assert bench(*words, "--resume") == 0
    # The second call's engine warms up again, and runs what was missing.
    assert [len(note["batches"]) > 0 for note in notes_of(tmp_path, "sam-k2") if "batches" in note] == [True] * (4 + 4)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert {row["responses"] for row in result["rows"]} == {16}
    assert bench(*words, "--resume") == 0 and len(notes_of(tmp_path, "sam-k2")) == 2 + 8, "nothing is left to do"
    capsys.readouterr()
    assert bench(*words, "--resume", "--temperature", "0.5") == 2
    assert "rounds.jsonl is of another --temperature: name another --output" in capsys.readouterr().err


def refusals(tmp_path):
    def write(name, *rows):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    def text(name, prompt, response, samples=4):
        return ["--text", write(name, *[{"prompt_tokens": prompt, "response_tokens": response}] * samples)]

    return [
        (["--variants", "stock", "eagle"], "argument --variants: invalid choice: 'eagle'"),
        (["--variants", "sam", "ngram"], "expected different ones, stock or off among them, to compare with"),
        (["--variants", "stock", "hybrid"], "--draft-model None: it goes with draft_model or hybrid or eagle3 among"),
        (["--variants", "off", "hybrid", "--draft-model", "/nowhere"], "/nowhere: no config.json there"),
        (["--rounds", "0"], "argument --rounds: 0: expected 1 or more"),
        (["--requests", "4", "4"], "--requests 4 4: expected different numbers"),
        (["--draft-tokens", "99"], "num_speculative_tokens=99"),
        (["--requests", "500"], "80 groups, all rounds need 252, so that none comes again: give more, or lower"),
        (["oops"], "oops: expected an option of sam bench, or one of vLLM's engine"),
        (["--speculative-config={}"], "--speculative-config: the variants set it, leave it out"),
        (["--text", "x.npz"], "--text has its own prompts: leave --prompts out"),
        (["--prompts", write("b.jsonl", {"prompt": "a"})], "line 1: it is text, and the model's folder has no tok"),
        (["--prompts", write("c.jsonl", {"prompt_token_ids": [1.5]})], "line 1, prompt_token_ids[0]: "),
        (text("g.jsonl", [1], [2], 1), "its largest group has 1 responses, --samples needs 4: set it to 1 or less"),
        (text("h.jsonl", [1], [100]), "token 100, the model knows 0 to 99: it is of another tokenizer than the model"),
    ]


def test_bad_input_is_one_line_before_an_engine_starts(bench, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(engines, "EngineProcess", lambda *_, **__: pytest.fail("an engine was started"))
    for arguments, message in refusals(tmp_path):
        own = None if "--text" in arguments and arguments[1] != "x.npz" else tmp_path / "prompts.jsonl"
        assert bench(*arguments, prompts=own) == 2, arguments
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_process_that_does_not_answer_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("sam.bench.engines.STOP_SECONDS", 0.1)
    deaf = "import os, signal, time; signal.signal(2, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(600)"
    engine = EngineProcess("off", tmp_path / "off.log", dict(os.environ), (sys.executable, "-c", deaf))
    while not (pid := (tmp_path / "off.log").read_text()).endswith("\n"):
        time.sleep(0.01)
    engine.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)


def test_what_each_variants_engine_is_told(tmp_path):
    (tmp_path / "config.json").write_text("{}")

    def told(variant, *words):
        return parse(["--model", str(tmp_path), *words, "--dtype", "float32"]).start(variant)

    def speculation(variant, *words):
        found = SpeculationConfig.from_dict(told(variant, *words)["speculation"])
        return found.method, found.policy, found.num_speculative_tokens, found.draft_model

    stock = {"model": str(tmp_path), "engine": ["--dtype", "float32"], "forces_text": False, "speculation": None}
    assert told("stock") == stock and told("stock", "--text", "a")["forces_text"]
    assert speculation("off")[0] == "off" and speculation("sam") == ("sam", "goodput", 8, None)
    assert speculation("sam-k2", "--draft-tokens", "5") == ("sam", "always", 2, None)
    hybrid = ["--variants", "off", "hybrid", "--draft-model", str(tmp_path)]
    assert speculation("hybrid", *hybrid) == ("hybrid", "goodput", 8, str(tmp_path))


@pytest.mark.parametrize(
    ("chosen", "stock", "ours"),
    [(None, "ascend", "ascend,sam"), ("sam,mine", "mine", "mine,sam"), ("mine", "mine", "mine,sam")],
)
def test_variables_of_the_processes_stock_loads_every_plugin_but_ours(monkeypatch, chosen, stock, ours):
    places = {"sam": "vllm.general_plugins", "ascend": "vllm.platform_plugins", "cli": "console_scripts"}
    plugins = [EntryPoint(name, f"{name}.vllm.plugin:f", group) for name, group in places.items()]
    monkeypatch.setattr(engines, "distributions", lambda: [SimpleNamespace(entry_points=plugins)])
    monkeypatch.setattr(engines, "vllm_version", lambda: "0.23.0+cpu")
    for name in ("VLLM_PLUGINS", "VLLM_USE_V2_MODEL_RUNNER", *HUGE_PAGES):
        monkeypatch.delenv(name, raising=False)
    if chosen:
        monkeypatch.setenv("VLLM_PLUGINS", chosen)
    theirs, own = environment_of("stock"), environment_of("sam")
    assert (theirs["VLLM_PLUGINS"], own["VLLM_PLUGINS"]) == (stock, ours)
    assert "VLLM_USE_V2_MODEL_RUNNER" not in theirs and own["VLLM_USE_V2_MODEL_RUNNER"] == "0"
    assert not HUGE_PAGES.keys() & theirs.keys() and own.items() >= HUGE_PAGES.items()


@pytest.mark.parametrize(
    ("ratios", "answer"),
    [
        ([1.03, 1.05, 1.04], GO),
        ([1.01, 1.38, 1.44], NOISY),  # one round gained nothing
        ([1.00, 1.01, 1.015], NO_GO),  # a gain, but not worth a setting
        ([1.38], NOISY),  # one round has no range
    ],
)
def test_go_or_no_go_from_the_ratios_of_a_few_rounds(ratios, answer):
    assert compared([1.0] * len(ratios), ratios)["answer"] == answer
