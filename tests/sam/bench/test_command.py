"""`sam bench --model` with processes that speak its protocol without an engine."""

import functools
import json
import os
import sys
import time
from pathlib import Path

import pytest

from sam.bench import engines
from sam.bench.engines import EngineProcess
from sam_recipe.bench import main

FAKE_ENGINE = Path(__file__).with_name("fake_engine.py")
HEAD = {"architectures": ["LlamaForCausalLMEagle3"], "vocab_size": 100}  # an EAGLE3 head's config.json


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

    def run(*arguments, prompts=prompts, seconds=(), **fake):
        times = {"stock": 1.0, "off": 0.95, "sam": 0.7, "sam-k2": 0.8} | dict(seconds)
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


def asked_of(tmp_path, variant):
    """The batches of each run that an engine was asked for."""
    return [note["batches"] for note in notes_of(tmp_path, variant) if "batches" in note]


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
    assert "batches of a round, one after another: 8 of 1 request, 2 of 4 requests; 8 requests of a prompt" in text
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["settings"]["engine"][:2] == ["--dtype", "float32"] and result["settings"]["seeds"]
    assert [row["answer"] for row in result["rows"]] == ["no-go", "go", "go"] * 2
    assert result["rows"][2]["acceptance_length"] == 2.0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "off.log", "result.json", "rounds.json", "sam.log", "stock.log",
    }  # fmt: skip
    assert nothing_is_left(tmp_path)
    # All variants get the same requests, new ones in every run: warm-ups of one batch, then by round and load as many
    # batches as give eight responses.
    runs = asked_of(tmp_path, "stock")
    assert runs == asked_of(tmp_path, "off") == asked_of(tmp_path, "sam")
    assert [[len(batch) for batch in run] for run in runs] == [[1], [4], *[[1] * 8, [4] * 2] * 3]
    batches = [batch for run in runs for batch in run]
    prompts = [{tuple(request["prompt_token_ids"]) for request in batch} for batch in batches]
    assert len(set.union(*prompts)) == sum(map(len, prompts)), "no batch repeats another one's prompt"
    seeds = [request["seed"] for batch in batches for request in batch]
    assert len(set(seeds)) == len(seeds)


def test_more_rounds_later(bench, tmp_path, capsys):
    assert bench("--rounds", "1") == 0
    assert "(--rounds 4 --resume)" in capsys.readouterr().out
    assert bench("--rounds", "1") == 2 and "is there already: go on with --resume" in capsys.readouterr().err
    assert bench("--rounds", "4", "--resume") == 0
    assert "go: 1.43x" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "out" / "rounds.json").read_text())["rounds"]) == 4 * 2
    before = notes_of(tmp_path, "sam")
    assert bench("--rounds", "4", "--resume") == 0 and notes_of(tmp_path, "sam") == before, "no engine is started"
    assert bench("--resume", "--samples", "2") == 2
    assert "samples was 8, now 2: use the same settings" in capsys.readouterr().err


def test_ctrl_c_keeps_what_is_measured(bench, tmp_path, capsys, monkeypatch):
    class Interrupted(engines.EngineProcess.func):
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
    assert "at 1 request" in text and "x at 4 requests" not in text and "--resume" in text and nothing_is_left(tmp_path)
    assert bench("--resume") == 0 and "go: 1.43x (1.43-1.43) at 4 requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fake", "message", "measured"),
    [
        ({"refuses": "sam-k2"}, "sam-k2: unrecognized arguments: --wings: see", 0),
        ({"dies": "sam-k2"}, "sam-k2: the engine's process ended with code 9: see", 1),
    ],
)
def test_a_variant_that_fails_is_left_out(bench, tmp_path, capsys, fake, message, measured):
    words = ["--variants", "stock", "sam", "sam-k2", "--rounds", "2"]
    assert bench(*words, **fake) == 2
    text, error = capsys.readouterr()
    (line,) = [line for line in error.splitlines() if line.startswith("error: ")]
    assert message in line and line.endswith("sam-k2.log") and f"left out: {message}" in text
    rows = json.loads((tmp_path / "out" / "result.json").read_text())["rows"]
    assert {row["rounds"] for row in rows if row["variant"] != "sam-k2"} == {2}
    assert sum(row["variant"] == "sam-k2" for row in rows) == measured and nothing_is_left(tmp_path)
    assert bench(*words, "--resume") == 0  # what it missed is measured again with all
    rows = json.loads((tmp_path / "out" / "result.json").read_text())["rows"]
    assert [row["rounds"] for row in rows] == [2] * 6
    # Without the reference there is nothing to compare.
    assert bench("--output", str(tmp_path / "none"), refuses="stock") == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")][-1]
    assert "stock: unrecognized arguments: --wings: see" in error and nothing_is_left(tmp_path)


def refusals(tmp_path, bench):
    def write(name, *rows):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(tmp_path / name)

    def folder(name, config):
        (tmp_path / name).mkdir()
        return str(Path(write(f"{name}/config.json", config)).parent)

    def text(name, prompt, response, samples=4):
        rows = [{"prompt_tokens": prompt, "response_tokens": response}] * samples
        return ["--text", write(name, *rows)]

    head, other = folder("head", HEAD), folder("other", {"vocab_size": 99})
    return [
        (["--variants", "stock", "eagle"], "--variants eagle: expected some of stock, stock-v1, "),
        (["--variants", "off", "sam-k16"], "--variants sam-k16: expected some of "),
        (["--variants", "off", "off"], "one comes twice"),
        (["--variants", "sam", "ngram"], "expected stock or off among them, to compare with"),
        (["--variants", "stock", "hybrid"], "--variants hybrid: it needs --draft-model DIR, the folder of a draft"),
        (["--draft-model", head], "no variant drafts with it: add draft_model or hybrid or eagle3"),
        (["--variants", "off", "draft_model", "--draft-model", head], "holds an EAGLE3 head, --variants draft_model"),
        (["--variants", "off", "eagle3", "--draft-model", other], "holds no EAGLE3 head, --variants eagle3 drafts"),
        (["--variants", "off", "hybrid", "--draft-model", other], "its vocab_size is 99, the model's is 100: make one"),
        (["--variants", "off", "hybrid", "--draft-model", "/nowhere"], "--draft-model /nowhere: no config.json there"),
        (["--model", "/nowhere"], "/nowhere: no config.json there; expected the folder of a model"),
        (["--tokenizer=nowhere"], "nowhere: no tokenizer there; expected a folder with one"),
        *(([f"--{name}", "0"], f"--{name} 0: expected 1 or more") for name in ("rounds", "responses")),
        (["--requests", "few"], "argument --requests: invalid int value: 'few'"),
        (["--requests", "4", "4"], "--requests 4 4: expected different numbers from 1"),
        (["--temperature", "nan"], "--temperature nan: expected 0 or more"),
        (["--draft-tokens", "99"], "num_speculative_tokens=99"),
        (["--requests", "500"], "80 prompts, all rounds need 252, so that none comes again: give more, or lower"),
        (["oops"], "oops: expected an option of sam bench, or one of vLLM's engine"),
        (["--speculative-config={}"], "--speculative-config: the variants set it, leave it out"),
        (["--additional_config.x", "1"], "--additional-config: the variants set it, leave it out"),
        (["--requets", "1"], "--requets: did you mean --requests?"),
        (["--text", "x.npz"], "--text has its own prompts: leave --prompts out"),
        (["--prompts", write("a.txt")], "a.txt: expected .jsonl or .parquet"),
        (["--prompts", write("a.jsonl")], "a.jsonl: expected prompts in it"),
        (["--prompts", write("b.jsonl", {"prompt": "a"})], "line 1: it is text, and the model's folder has no tok"),
        (["--prompts", write("c.jsonl", {"prompt_token_ids": [1.5]})], "line 1, prompt_token_ids[0]: "),
        (["--prompts", write("d.jsonl", {"prompt_token_ids": []})], "prompt_token_ids: expected at least one token"),
        (["--prompts", write("e.jsonl", *[{"prompt_token_ids": [100]}] * 80)], "token 100, the model knows 0 to 99"),
        (["--text", "/nowhere.npz"], "/nowhere.npz: no such file"),
        (text("f.jsonl", [1], []), "no token of a response in it"),
        (text("g.jsonl", [1], [2], 1), "its largest group has 1 responses, --samples needs 4: set it to 1 or less"),
        (text("h.jsonl", [1], [100]), "a response to prompt 1 has token 100, the model knows 0 to 99: it is of anot"),
    ]


def test_bad_input_is_one_line_before_an_engine_starts(bench, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(engines, "EngineProcess", lambda *_, **__: pytest.fail("an engine was started"))
    for arguments, message in refusals(tmp_path, bench):
        own = None if "--text" in arguments and arguments[1] != "x.npz" else tmp_path / "prompts.jsonl"
        assert bench(*arguments, prompts=own) == 2, arguments
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error and error.count("\n") == 1
    find_spec = sys.modules["importlib.util"].find_spec
    absent = functools.partial(lambda name, *_: None if name == "arctic_inference" else find_spec(name))
    monkeypatch.setattr("importlib.util.find_spec", absent)
    assert bench("--variants", "stock", "suffix") == 2
    assert "--variants suffix: it needs arctic-inference: install the extra `peers`" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_process_that_does_not_answer_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("sam.bench.engines.STOP_SECONDS", 0.1)
    deaf = "import os, signal, time; signal.signal(2, signal.SIG_IGN); print(os.getpid(), flush=True); time.sleep(600)"
    engine = EngineProcess("off", tmp_path / "off.log", dict(os.environ), (sys.executable, "-c", deaf))
    while not (pid := (tmp_path / "off.log").read_text()).endswith("\n"):
        time.sleep(0.01)
    engine.stop()
    engine.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
