"""verl and vLLM are asked before anything starts, and what they say is one line that names the key."""

import subprocess
import sys

import pytest
from transformers import AutoConfig, Qwen3Config

from recipe import main_dapo
from recipe.launch import environment
from recipe.launch.config import REPOSITORY, compose_config
from recipe.preflight import vllm_command
from recipe.tiny.tokenizer import build_tokenizer
from tests.recipe.preflight.preflight_node import write_data

ROLLOUT = "actor_rollout_ref.rollout"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"


@pytest.fixture
def assets(tmp_path, monkeypatch):
    """Files as recipe.tiny.assets builds them, with a model that has no weights: nothing here reads them."""
    for name, value in (environment.OFFLINE | environment.CPU).items():
        monkeypatch.setenv(name, value)
    write_data(tmp_path / "data")
    for name, made in (("train", "dapo_math_17k"), ("val", "aime_2024")):
        (tmp_path / "data" / f"{made}.parquet").rename(tmp_path / f"{name}.parquet")
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen3Config(**sizes, max_position_embeddings=2048, architectures=["Qwen3ForCausalLM"])
    model.save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setattr("recipe.preflight.weights.find_problems", lambda folder: iter(()))
    monkeypatch.setattr("vllm.model_executor.models.registry._run_in_subprocess", lambda function: function())
    return tmp_path


def here(*overrides, name="dapo_tiny_cpu"):
    return list(vllm_command.find_problems_here(compose_config(name, list(overrides))))


def test_the_arguments_are_those_of_verls_first_server():
    config = compose_config("dapo_qwen3_235b", [])
    made = vllm_command.server_arguments(config)
    assert (made["max_num_seqs"], made["data_parallel_size"], made["nnodes"]) == (64, 32, 8)
    assert made["enable_expert_parallel"] is True
    assert made["worker_extension_cls"] == "recipe.rollout.server.SpeculationWorkerExtension"
    assert vllm_command.engine_arguments(config).additional_config["speculation"]["method"] == "sam"


def test_a_users_additional_config_is_kept():
    made = vllm_command.server_arguments(
        compose_config("dapo_tiny_cpu", [f"+{VLLM}.additional_config.enable_cpu_binding=true"])
    )["additional_config"]
    assert made["enable_cpu_binding"] is True and made["speculation"]["method"] == "sam"


# The key as the user types it, the value, what is said; and another override that belongs to the mistake.
WRONG = [
    (f"{ROLLOUT}.max_num_seqs", "-4", "config.value"),
    (f"+{VLLM}.max_num_seqs", "-4", "vllm.arguments"),
    (f"+{VLLM}.block_size", "-1", "vllm.arguments"),
    (f"{ROLLOUT}.dtype", "float17", "vllm.arguments"),
    (f"{ROLLOUT}.gpu_memory_utilization", "1.7", "vllm.arguments"),
    (f"{ROLLOUT}.max_model_len", "100", "length.model"),
    (f"{ROLLOUT}.max_model_len", "99999", "vllm.arguments"),
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


def test_what_the_plugin_would_refuse_in_the_engine(assets):
    model = assets / "recurrent"
    AutoConfig.for_model("qwen3_next", architectures=["Qwen3NextForCausalLM"]).save_pretrained(model)
    named = f"actor_rollout_ref.model.path={model}"
    for method, is_refused in (("sam", True), ("ngram", True), ("off", False)):
        found = here(named, f"speculation={method}")
        said = [one for one in found if "no drafts for a model with linear_attention layers" in one]
        assert bool(said) == is_refused and all("\n" not in one for one in found)
    (lossy,) = here(f"+{VLLM}.additional_config.enable_reduce_sample=true", name="dapo_qwen3_32b")
    assert lossy.code == "vllm.arguments" and "enable_reduce_sample=True leaves each rank a part" in lossy
    assert here("assets=/no/such/folder") == []


@pytest.mark.engine  # imports vLLM once more, as an engine would
def test_a_process_of_its_own_answers_as_this_one(assets, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_command, "ACCEPTED", tmp_path / "accepted")
    config = compose_config("dapo_tiny_cpu", [f"assets={assets}", f"{ROLLOUT}.dtype=float17"])
    assert list(vllm_command.find_problems(config)) == list(vllm_command.find_problems_here(config)) != []


def test_what_is_taken_is_asked_once_what_is_refused_again_and_nothing_stops_a_run_that_cannot_be_asked(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(vllm_command, "ACCEPTED", tmp_path / "accepted")
    asked, answers = [], iter(([("vllm.arguments", "dtype=x", None)], None, []))
    run = subprocess.run
    monkeypatch.setattr(vllm_command, "_ask", lambda config: asked.append(0) or next(answers))
    found = [len(list(vllm_command.find_problems(compose_config("dapo_tiny_cpu", [])))) for _ in range(4)]
    assert found == [1, 0, 0, 0] and len(asked) == 3  # refused, not to be asked, taken
    again = ["speculation.batch_size_threshold=7", "seed=3", "run_dir=/elsewhere", "trainer.total_epochs=3"]
    assert list(vllm_command.find_problems(compose_config("dapo_tiny_cpu", again))) == []
    assert len(asked) == 3  # knobs of speculation and seeds do not ask again
    monkeypatch.undo()
    monkeypatch.setattr(vllm_command, "ACCEPTED", tmp_path / "none")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert list(vllm_command.find_problems(compose_config("dapo_tiny_cpu", []))) == []
    assert run(["git", "check-ignore", REPOSITORY / ".cache" / "vllm_arguments"], cwd=REPOSITORY).returncode == 0
