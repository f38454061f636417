"""`sam bench --model` with processes that speak its protocol without an engine."""

import functools
import json
import sys
import time
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipe.sam_dapo.bench import main
from sam.config import HUGE_PAGES
from sam.tools.bench import engines
from sam.tools.bench.engines import EngineProcess, environment_of

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
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)

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


def notes_of(tmp_path, variant, kind):
    notes = map(json.loads, (tmp_path / "engines" / f"{variant}.jsonl").read_text().splitlines())
    return [note[kind] for note in notes if kind in note]


def nothing_is_left(tmp_path):
    """Whether the engines and all processes that they started are gone, or are within a few seconds."""
    notes = [notes_of(tmp_path, path.stem, "processes") for path in (tmp_path / "engines").iterdir()]
    stats = [Path(f"/proc/{pid}/stat") for pids in sum(notes, []) for pid in pids]
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
    (told,) = notes_of(tmp_path, "sam", "speculation")
    assert (told["policy"], told["num_speculative_tokens"]) == ("goodput", 8)
    files = {"off.log", "sam.log", "stock.log", "result.json", "rounds.jsonl"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == files and nothing_is_left(tmp_path)
    # All variants get the same requests, new ones in every run: warm-ups of one batch, then by round and load as many
    # batches as give eight responses.
    off, sam, stock = (notes_of(tmp_path, variant, "batches") for variant in ("off", "sam", "stock"))
    sizes = [[len(batch) for batch in run] for run in stock]
    assert off == sam == stock and sizes == [[1], [4], *[[1] * 8, [4] * 2] * 3]
    batches = [batch for run in stock for batch in run]
    prompts = [{tuple(request["prompt_token_ids"]) for request in batch} for batch in batches]
    assert len(set.union(*prompts)) == sum(map(len, prompts)), "no batch repeats another one's prompt"
    seeds = [request["seed"] for batch in batches for request in batch]
    assert len(set(seeds)) == len(seeds)
    assert bench() == 2 and "result.json is there already: name another --output" in capsys.readouterr().err


def test_a_model_by_its_name_is_fetched_first(bench, tmp_path, capsys, monkeypatch):
    import huggingface_hub

    def fetch(name, allow_patterns):
        assert name == "Owner/Name" and "*.safetensors" in allow_patterns
        return str(tmp_path / "model")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert bench("--model", "Owner/Name") == 0
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["settings"]["model"] == str(tmp_path / "model")
    capsys.readouterr()

    def fail(name, allow_patterns):
        raise OSError("no network\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert bench("--model", "Owner/Name") == 2
    error = capsys.readouterr().err
    assert error.startswith("error: Owner/Name: no such folder, and not fetched from Hugging Face (no network): ")
    assert "bash scripts/prepare_model.sh Owner/Name" in error and error.count("\n") == 1
    assert bench("--model", "Owner/Name", "--check") == 0


def test_ctrl_c_keeps_what_is_measured_and_kills_an_engine_that_does_not_end(bench, tmp_path, capsys, monkeypatch):
    class Interrupted(EngineProcess):
        replies = 0

        def ask(self, command):
            Interrupted.replies += 1
            if Interrupted.replies == 3 + 6 + 3 + 2:  # starts, warm-ups, the first load's round, and then
                raise KeyboardInterrupt
            return super().ask(command)

    program = engines.EngineProcess.keywords["program"]
    monkeypatch.setattr(engines, "EngineProcess", functools.partial(Interrupted, program=program))
    monkeypatch.setattr(engines, "STOP_SECONDS", 0.1)
    assert bench(deaf="off") == 130
    text = capsys.readouterr().out
    assert "too noisy to tell: 1.43x (1.43-1.43) at 1 request: use --rounds 4" in text
    assert "x at 4 requests" not in text and nothing_is_left(tmp_path)


def test_json_is_what_the_result_file_has(bench, tmp_path, capsys):
    assert bench("--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "out" / "result.json").read_text())


def test_a_measurement_that_an_engine_ends_keeps_what_is_measured_and_goes_on(bench, tmp_path, capsys):
    words = ("--variants", "stock", "sam-k2", "--rounds", "2")

    def error():
        text, errors = capsys.readouterr()
        (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
        return line, text

    assert bench(*words, refuses="sam-k2") == 2
    line, text = error()
    assert "sam-k2: unrecognized arguments: --wings: see" in line and line.endswith("sam-k2.log")
    assert "1.25x" not in text and not (tmp_path / "out" / "result.json").exists()
    assert bench(*words, dies=["sam-k2", 4]) == 2  # after both loads' warm-up and first round
    line, text = error()
    assert "sam-k2: the engine's process ended with code 9: see" in line and "1.25x" in text
    assert bench(*words, "--resume") == 0
    # The last call's engine warms up again, and runs what was missing.
    assert len(batches := notes_of(tmp_path, "sam-k2", "batches")) == 4 + 4
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert {row["responses"] for row in result["rows"]} == {16}
    assert bench(*words, "--resume") == 0 and notes_of(tmp_path, "sam-k2", "batches") == batches, "no more to do"
    assert bench(*words, "--resume", "--temperature", "0.5") == 2
    assert "rounds.jsonl is of another --temperature: name another --output" in error()[0]
    rounds = tmp_path / "out" / "rounds.jsonl"
    settings, first, *_ = map(json.loads, rounds.read_text().splitlines())
    for wrong, said in (
        (first | {"round": "1"}, "line 2: not what sam bench writes (expected settings, or a round of a load)"),
        (first | {"runs": {"stock": {"seconds": float("nan")}}}, "line 2: not what sam bench writes ("),
        (first | {"runs": {"stock": first["runs"]["stock"]}}, "rounds.jsonl: not what sam bench writes ('sam-k2')"),
    ):
        rounds.write_text("\n".join(map(json.dumps, [settings, wrong, first | {"round": 2}, ""])))
        assert bench(*words, "--resume") == 2 and said in error()[0]
    assert nothing_is_left(tmp_path)


def test_bad_input_is_one_line_before_an_engine_starts(bench, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(engines, "EngineProcess", lambda *_, **__: pytest.fail("an engine was started"))
    row, prompt = tmp_path / "row.jsonl", tmp_path / "prompt.jsonl"
    row.write_text('{"prompt_tokens": [1], "response_tokens": [100]}')
    prompt.write_text('{"prompt": "a"}')
    for arguments, message in (
        (["--variants", "sam", "ngram"], "expected different ones, stock or off among them, to compare with"),
        (["--variants", "stock", "hybrid"], "--draft-model None: it goes with draft_model or hybrid or eagle3 among"),
        (["--variants", "off", "hybrid", "--draft-model", "/nowhere"], "/nowhere: no config.json there"),
        (["--requests", "4", "4"], "--requests 4 4: expected different numbers"),
        (["--draft-tokens", "99"], "num_speculative_tokens=99"),
        (["--requests", "500"], "80 groups, all rounds need 252, so that none comes again: give more, or lower"),
        (
            ["--max-modle-len", "5"],
            "--max-modle-len: neither sam bench nor vLLM's engine knows it: did you mean --max-m",
        ),
        (["--rquests", "5", "--check"], "--rquests: neither sam bench nor vLLM's engine knows it: did you mean --requ"),
        (["oops"], "oops: expected an option of sam bench, or one of vLLM's engine"),
        (["--speculative-config={}"], "--speculative-config: the variants set it, leave it out"),
        (["--prompts", prompt], "line 1: it is text, and the model's folder has no tok"),
        (["--text", row], "its largest group has 1 responses, --samples needs 4: set it to 1 or less"),
        (["--text", row, "--samples", "1"], "token 100, the model knows 0 to 99: it is of another tokenizer than the"),
    ):
        assert bench(*map(str, arguments), prompts=None if "--text" in arguments else tmp_path / "prompts.jsonl") == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("chosen", "stock", "ours"), [(None, "ascend", "ascend,sam"), ("sam,mine", "mine", "mine,sam")]
)
def test_variables_of_the_processes_stock_loads_every_plugin_but_ours(monkeypatch, chosen, stock, ours):
    places = {"sam": "vllm.general_plugins", "ascend": "vllm.platform_plugins", "cli": "console_scripts"}
    plugins = [EntryPoint(name, f"{name}.vllm.plugin:f", group) for name, group in places.items()]
    monkeypatch.setattr(engines, "distributions", lambda: [SimpleNamespace(entry_points=plugins)])
    monkeypatch.setattr(engines, "vllm_version", lambda: "0.24.0+cpu")
    for name in ("VLLM_PLUGINS", *HUGE_PAGES):
        monkeypatch.delenv(name, raising=False)
    if chosen:
        monkeypatch.setenv("VLLM_PLUGINS", chosen)
    theirs, own = environment_of("stock"), environment_of("sam")
    assert (theirs["VLLM_PLUGINS"], own["VLLM_PLUGINS"]) == (stock, ours)
    assert not HUGE_PAGES.keys() & theirs.keys() and own.items() >= HUGE_PAGES.items()
