"""vLLM is asked before anything starts, with the arguments that verl would hand to it."""

import re
import subprocess
import sys

import pytest
from transformers import AutoConfig, Qwen3Config

from recipe import main_dapo
from recipe.launch import environment
from recipe.launch.config import REPOSITORY, compose_config
from recipe.preflight import report, vllm_command, vllm_refusals
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

    made = vllm_refusals.command_line(vllm_command.server_arguments(config))
    assert by_name(made) == by_name(verl_command(config, monkeypatch))


# The key as the user types it, the value, what is said; and another override that belongs to the mistake.
WRONG = [
    (f"{ROLLOUT}.max_num_seqs", "-4", "config.value"),
    (f"+{VLLM}.max_num_seqs", "-4", "vllm.arguments"),
    (f"+{VLLM}.block_size", "-1", "vllm.arguments"),
    (f"{ROLLOUT}.dtype", "float17", "vllm.arguments"),
    (f"{ROLLOUT}.gpu_memory_utilization", "1.7", "vllm.arguments"),
    (f"{ROLLOUT}.gpu_memory_utilization", "0", "vllm.arguments"),
    (f"{ROLLOUT}.max_model_len", "100", "length.model"),
    (f"{ROLLOUT}.max_model_len", "99999", "vllm.arguments"),
    (f"{ROLLOUT}.max_num_batched_tokens", "-1", "config.value"),
    (f"+{VLLM}.max_number_of_seqs", "3", "vllm.arguments"),
    (f"{ROLLOUT}.tensor_model_parallel_size", "3", "parallel.rollout"),
    (f"+{VLLM}.tensor_parallel_size", "3", "parallel.engine_kwargs"),
    (f"{ROLLOUT}.load_format", "nonsense", "vllm.arguments"),
    (f"+{VLLM}.kv_cache_dtype", "int3", "vllm.arguments"),
    (f"{ROLLOUT}.max_num_batched_tokens", "600", "vllm.arguments",
     f"{ROLLOUT}.enable_chunked_prefill=false", f"{ROLLOUT}.max_num_seqs=8"),
    (f"{ROLLOUT}.scheduling_policy", "lifo", "vllm.arguments"),
    (f"+{VLLM}.attention_backend", "FLASHY", "vllm.arguments"),
    ("seed", "-5", "config.value"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "code", "more"), [(*row[:3], row[3:]) for row in WRONG])
def test_a_wrong_value_is_one_line_that_names_the_key(assets, monkeypatch, capsys, key, value, code, more):
    monkeypatch.setattr(vllm_command, "find_problems", vllm_command.find_problems_here)  # no process of its own
    arguments = ["--config-name", "dapo_tiny_cpu", f"assets={assets}", f"{key}={value}", *more]
    assert main_dapo.main(["--check", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {key.lstrip('+')}={value}") and f"[{code}]" in line


def test_preflights_report_has_the_same_line(assets, capsys):
    arguments = ["--config-name", "dapo_tiny_cpu", f"assets={assets}", f"+{VLLM}.block_size=-1"]
    assert report.main(arguments) == 2
    said = capsys.readouterr().out
    assert f"{VLLM}.block_size=-1: " in said and "greater than 0: vLLM refuses it: change it [vllm.arguments]" in said


def test_vllm_says_the_same_where_model_and_device_are_not_there(assets):
    config = compose_config("dapo_qwen3_32b", [f"{ROLLOUT}.gpu_memory_utilization=1.7"])
    assert list(vllm_command.find_problems_here(compose_config("dapo_tiny_cpu", ["assets=/no/such/folder"]))) == []
    (problem,) = vllm_command.find_problems_here(config)
    assert problem.code == "vllm.arguments" and problem.startswith(f"{ROLLOUT}.gpu_memory_utilization=1.7: ")


@pytest.mark.parametrize("name", ["dapo_tiny_cpu", "dapo_qwen3_8b_cuda"])
def test_drafts_for_a_model_with_recurrent_state_are_refused_on_every_device(assets, monkeypatch, name):
    monkeypatch.setattr("vllm.model_executor.models.registry._run_in_subprocess", lambda function: function())
    model = assets / "recurrent"
    AutoConfig.for_model("qwen3_next", architectures=["Qwen3NextForCausalLM"]).save_pretrained(model)
    for method in ("sam", "ngram"):
        config = compose_config(name, [f"actor_rollout_ref.model.path={model}", f"speculation={method}"])
        (problem,) = vllm_command.find_problems_here(config)
        assert "no drafts for a model with linear_attention layers" in problem and "\n" not in problem
    without = compose_config(name, [f"actor_rollout_ref.model.path={model}", "speculation=off"])
    assert not [problem for problem in vllm_command.find_problems_here(without) if "layers" in problem]


@pytest.mark.engine  # imports vLLM once more, as an engine would
def test_a_process_of_its_own_answers_as_this_one(assets, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_command, "ACCEPTED", tmp_path / "accepted")
    config = compose_config("dapo_tiny_cpu", [f"assets={assets}", f"{ROLLOUT}.dtype=float17"])
    assert list(vllm_command.find_problems(config)) == list(vllm_command.find_problems_here(config)) != []


def test_what_vllm_takes_is_asked_once_and_what_it_refuses_again(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_command, "ACCEPTED", tmp_path / "accepted")
    asked, answers = [], iter(([["dtype", "wrong"]], None, []))
    monkeypatch.setattr(vllm_command, "_refusals_by_a_process", lambda question: asked.append(0) or next(answers))
    config = compose_config("dapo_tiny_cpu", [])
    assert [len(list(vllm_command.find_problems(config))) for _ in range(5)] == [1, 0, 0, 0, 0]
    assert len(asked) == 3  # refused, not to be asked, taken


def test_a_run_is_not_kept_from_starting_by_a_vllm_that_cannot_be_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_command, "ACCEPTED", tmp_path / "accepted")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert list(vllm_command.find_problems(compose_config("dapo_tiny_cpu", []))) == []


def test_knobs_of_speculation_and_seeds_do_not_ask_again():
    def fingerprint(*overrides):
        return vllm_command._fingerprint(vllm_command._question(compose_config("dapo_tiny_cpu", list(overrides))))

    assert fingerprint("speculation.batch_size_threshold=7", "seed=3", "run_dir=/elsewhere") == fingerprint()
    assert fingerprint(f"{ROLLOUT}.max_num_seqs=64") != fingerprint()


def test_the_answers_are_kept_where_git_looks_away():
    ignored = subprocess.run(["git", "check-ignore", vllm_command.ACCEPTED], cwd=REPOSITORY, capture_output=True)
    assert ignored.returncode == 0
