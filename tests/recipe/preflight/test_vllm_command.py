"""vLLM is asked before anything starts, with the arguments that verl would hand to it."""

import json
import re
import subprocess
import sys

import pytest
from transformers import Qwen3Config

from recipe import main_dapo
from recipe.launch import environment
from recipe.launch.config import REPOSITORY, compose_config
from recipe.preflight import report, vllm_command
from recipe.tiny.tokenizer import build_tokenizer
from tests.recipe.preflight.preflight_node import write_data
from tests.recipe.preflight.verl_command import verl_command

ROLLOUT = "actor_rollout_ref.rollout"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
CONFIGS = ("dapo_tiny_cpu", "dapo_qwen3_32b", "dapo_qwen3_32b_128die", "dapo_qwen3_235b", "dapo_qwen3_8b_cuda")


@pytest.fixture
def assets(tmp_path, monkeypatch):
    """Files as recipe.tiny.assets builds them, with a model that has no weights: nothing here reads them."""
    for name, value in (environment.OFFLINE | environment.CPU).items():
        monkeypatch.setenv(name, value)
    write_data(tmp_path / "data")
    for name, made in (("train", "dapo_math_17k"), ("val", "aime_2024")):
        (tmp_path / "data" / f"{made}.parquet").rename(tmp_path / f"{name}.parquet")
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen3Config(**sizes, max_position_embeddings=2048, architectures=["Qwen3ForCausalLM"]).save_pretrained(
        tmp_path / "model"
    )
    build_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setattr("recipe.preflight.weights.find_problems", lambda folder: iter(()))
    return tmp_path


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("method", ["sam", "off"])
def test_the_arguments_are_verls(name, method, monkeypatch):
    config = compose_config(name, [f"speculation={method}"])

    def by_name(line):
        """Values by option; the order does not matter."""
        return dict(part.partition(" ")[::2] for part in re.split(r"(?<!\S)--", " ".join(line) + " ")[1:])

    made = vllm_command.command_line(vllm_command.server_arguments(config))
    assert by_name(made) == by_name(verl_command(config, monkeypatch))


# The key as the user types it, the value, what is expected; and another override that belongs to the mistake.
WRONG = [
    (f"{ROLLOUT}.max_num_seqs", "-4", "expected an integer of at least 1"),
    (f"+{VLLM}.max_num_seqs", "-4", "vLLM expects a value greater than or equal to 1"),
    (f"+{VLLM}.block_size", "-1", "vLLM expects a value greater than 0"),
    (f"{ROLLOUT}.dtype", "float17", "vLLM expects one of auto, bfloat16, float, float16, float32, half"),
    (f"{ROLLOUT}.gpu_memory_utilization", "1.7", "vLLM expects a value less than or equal to 1"),
    (f"{ROLLOUT}.gpu_memory_utilization", "0", "vLLM expects a value greater than 0"),
    (f"{ROLLOUT}.max_model_len", "100", "is below data.max_prompt_length + max_response_length = 640"),
    (f"{ROLLOUT}.max_model_len", "99999", "greater than the derived max_model_len"),
    (f"{ROLLOUT}.max_num_batched_tokens", "-1", "expected an integer of at least 1"),
    (f"+{VLLM}.max_number_of_seqs", "3", "vLLM has no such argument: did you mean max_num_seqs?"),
    (f"{ROLLOUT}.tensor_model_parallel_size", "3", "does not divide the 1 devices"),
    (f"+{VLLM}.tensor_parallel_size", "3", "remove it"),
    (f"{ROLLOUT}.load_format", "nonsense", "Load format `nonsense` is not supported"),
    (f"+{VLLM}.kv_cache_dtype", "int3", "vLLM expects one of auto, bfloat16, float16, fp8"),
    (f"{ROLLOUT}.max_num_batched_tokens", "600", "smaller than max_model_len (640)",
     f"{ROLLOUT}.enable_chunked_prefill=false", f"{ROLLOUT}.max_num_seqs=8"),
    (f"{ROLLOUT}.scheduling_policy", "lifo", "vLLM expects one of fcfs, priority"),
    (f"+{VLLM}.attention_backend", "FLASHY", "Unknown attention backend"),
    ("seed", "-5", "expected an integer from 0 to 4294967295"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "expected", "more"), [(*row[:3], row[3:]) for row in WRONG])
def test_a_wrong_value_is_one_line_that_names_the_key(assets, monkeypatch, capsys, key, value, expected, more):
    monkeypatch.setattr(vllm_command, "find_problems", vllm_command.find_problems_here)  # no process of its own
    arguments = ["--config-name", "dapo_tiny_cpu", f"assets={assets}", f"{key}={value}", *more]
    assert main_dapo.main(["--check", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {key.lstrip('+')}={value}") and expected in line


def test_preflights_report_has_the_same_line(assets, capsys):
    arguments = ["--config-name", "dapo_tiny_cpu", f"assets={assets}", f"+{VLLM}.block_size=-1"]
    assert report.main(arguments) == 2
    assert f"{VLLM}.block_size=-1: vLLM expects a value greater than 0: change it" in capsys.readouterr().out


def test_vllm_says_the_same_where_model_and_device_are_not_there(assets):
    config = compose_config("dapo_qwen3_32b", [f"{ROLLOUT}.gpu_memory_utilization=1.7"])
    assert list(vllm_command.find_problems_here(compose_config("dapo_tiny_cpu", ["assets=/no/such/folder"]))) == []
    (problem,) = vllm_command.find_problems_here(config)
    assert problem.startswith(f"{ROLLOUT}.gpu_memory_utilization=1.7: vLLM expects a value less than or equal to 1")


@pytest.mark.engine  # imports vLLM once more, as an engine would
def test_a_process_of_its_own_answers_once(assets, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_command, "ANSWERS", tmp_path / "answers")
    config = compose_config("dapo_tiny_cpu", [f"assets={assets}", f"{ROLLOUT}.dtype=float17"])
    said = list(vllm_command.find_problems(config))
    assert len(said) == 1 and said[0].startswith(f"{ROLLOUT}.dtype=float17: vLLM expects one of auto, ")
    (kept,) = (tmp_path / "answers").iterdir()
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("asked twice"))
    assert list(vllm_command.find_problems(config)) == said
    kept.write_text(json.dumps([]))
    assert list(vllm_command.find_problems(config)) == []


def test_a_run_is_not_kept_from_starting_by_a_vllm_that_cannot_be_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_command, "ANSWERS", tmp_path / "answers")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert list(vllm_command.find_problems(compose_config("dapo_tiny_cpu", []))) == []


def test_knobs_of_speculation_and_seeds_do_not_ask_again():
    def fingerprint(*overrides):
        return vllm_command._fingerprint(vllm_command._question(compose_config("dapo_tiny_cpu", list(overrides))))

    assert fingerprint("speculation.batch_size_threshold=7", "seed=3", "run_dir=/elsewhere") == fingerprint()
    assert fingerprint(f"{ROLLOUT}.max_num_seqs=64") != fingerprint()


def test_the_answers_are_kept_where_git_looks_away():
    ignored = subprocess.run(["git", "check-ignore", vllm_command.ANSWERS], cwd=REPOSITORY, capture_output=True)
    assert ignored.returncode == 0
