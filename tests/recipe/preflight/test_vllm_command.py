"""verl and vLLM are asked before anything starts, and what they say is one line that names the key."""

import sys

import pytest
from transformers import AutoConfig, Qwen3Config

from sam_recipe.launch import environment
from sam_recipe.launch.config import compose_config
from sam_recipe.preflight import vllm_command
from sam_recipe.tiny.tokenizer import build_tokenizer
from tests.recipe.preflight.preflight_node import composed, config_of

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
ADDITIONAL = f"{VLLM}.additional_config"


@pytest.fixture
def assets(tmp_path, monkeypatch):
    """A model as sam_recipe.tiny.assets builds it but without weights, which nothing here reads."""
    for name, value in (environment.OFFLINE | environment.CPU).items():
        monkeypatch.setenv(name, value)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen3Config(**sizes, max_position_embeddings=2048, architectures=["Qwen3ForCausalLM"])
    model.save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setattr("vllm.model_executor.models.registry._run_in_subprocess", lambda function: function())
    return tmp_path


def of(assets, *overrides, name="dapo_tiny_cpu"):
    return config_of(name, f"actor_rollout_ref.model.path={assets}/model", *overrides)


def here(*arguments, **keywords):
    found = list(vllm_command.what_verl_and_vllm_say(of(*arguments, **keywords)))
    assert all("\n" not in one for one in found)
    return found


def test_the_arguments_are_those_of_verls_first_server():
    config = composed("dapo_qwen3_235b")
    made = vllm_command.server_arguments(config)
    assert (made["max_num_seqs"], made["data_parallel_size"], made["nnodes"]) == (64, 32, 8)
    assert made["enable_expert_parallel"] is True
    assert made["worker_extension_cls"] == "sam_recipe.rollout.server.SpeculationWorkerExtension"
    assert vllm_command.engine_arguments(config).additional_config["speculation"]["method"] == "sam"
    users = config_of("dapo_tiny_cpu", f"+{VLLM}.additional_config.enable_cpu_binding=true")
    kept = vllm_command.server_arguments(users)["additional_config"]
    assert kept["enable_cpu_binding"] is True and kept["speculation"]["method"] == "sam"


TINY, CLUSTER, VERL, ARGUMENTS = "dapo_tiny_cpu", "dapo_qwen3_32b", "config.verl", "vllm.arguments"
ALONE = (f"{ROLLOUT}.enable_chunked_prefill=false", f"{ROLLOUT}.max_num_seqs=8")
# Config, code, and what is said of the overrides; None: the line begins with the first, as the user types it.
REFUSED = [
    (TINY, ARGUMENTS, None, f"{VLLM}.max_num_seqs=-4"),
    (TINY, ARGUMENTS, None, f"{ROLLOUT}.dtype=float17"),
    (TINY, ARGUMENTS, None, f"{ROLLOUT}.gpu_memory_utilization=1.7"),
    (TINY, ARGUMENTS, None, f"{ROLLOUT}.max_model_len=99999"),
    (TINY, ARGUMENTS, None, f"{VLLM}.max_number_of_seqs=3"),
    (TINY, ARGUMENTS, None, f"{ROLLOUT}.load_format=nonsense"),
    (TINY, ARGUMENTS, None, f"{ROLLOUT}.max_num_batched_tokens=600", *ALONE),
    (TINY, ARGUMENTS, None, f"{VLLM}.attention_backend=FLASHY"),
    (TINY, VERL, "Invalid loss_agg_mode: token", f"{ACTOR}.loss_agg_mode=token"),
    (TINY, VERL, "must be equal to tensor_model_parallel_size", f"{ROLLOUT}.expert_parallel_size=4"),
    (TINY, VERL, "ofload", f"+{ACTOR}.fsdp_config.ofload=1"),
    (CLUSTER, VERL, "tensor_paralel", f"+{ACTOR}.megatron.tensor_paralel=8"),
    (CLUSTER, ARGUMENTS, "FULLL", f"{VLLM}.compilation_config.cudagraph_mode=FULLL"),
    (CLUSTER, ARGUMENTS, "=True leaves each rank a part", f"{ADDITIONAL}.enable_reduce_sample=true"),
    (CLUSTER, ARGUMENTS, "block_verify", f"{ADDITIONAL}.rejection_sampler_config.enable_block_verify=true"),
]


@pytest.mark.parametrize("row", REFUSED, ids=[row[3] for row in REFUSED])
def test_what_verl_or_vllm_refuses_is_one_line_in_its_words_or_with_the_key(assets, row):
    name, code, said, *overrides = row
    (line,) = here(assets, *overrides, name=name)
    assert line.endswith(f"[{code}]") and (said in line if said else line.startswith(overrides[0]))


def test_what_the_plugin_would_refuse_in_the_engine(assets):
    model = assets / "recurrent"
    AutoConfig.for_model("qwen3_next", architectures=["Qwen3NextForCausalLM"]).save_pretrained(model)
    named = f"actor_rollout_ref.model.path={model}"
    for method, is_refused in (("sam", True), ("ngram", True), ("off", False)):
        found = here(assets, named, f"speculation={method}")
        assert is_refused == any(", a model with recurrent layers" in one for one in found)
    assert here("/no/such/folder") == []


@pytest.mark.engine  # imports vLLM once more, as an engine would
def test_a_process_of_its_own_answers_as_this_one_and_loads_what_users_bring(assets, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_command, "ACCEPTED", tmp_path / "accepted")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import no_such_package\n")
    manager = "actor_rollout_ref.rollout.agent.agent_loop_manager_class=mine.Manager"
    config = of(assets, f"{ROLLOUT}.dtype=float17", manager)
    users, dtype = vllm_command.taken_by_verl_and_vllm(config)
    assert [dtype] == list(vllm_command.what_verl_and_vllm_say(config))
    assert f"{manager}: " in users and "no_such_package" in users


def test_what_is_taken_is_asked_once_what_is_refused_again_and_nothing_stops_a_run_that_cannot_be_asked(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(vllm_command, "ACCEPTED", tmp_path / "accepted")
    asked, answers = [], iter((["dtype=x"], None, [], []))
    monkeypatch.setattr(vllm_command, "_ask", lambda config: asked.append(0) or next(answers))
    config = composed("dapo_tiny_cpu")
    assert [len(list(vllm_command.taken_by_verl_and_vllm(config))) for _ in range(4)] == [1, 0, 0, 0]
    assert len(asked) == 3  # refused, not to be asked, taken
    again = ["speculation.batch_size_threshold=7", "seed=3", "run_dir=/elsewhere", "trainer.total_epochs=3"]
    assert list(vllm_command.taken_by_verl_and_vllm(compose_config("dapo_tiny_cpu", again))) == []
    assert len(asked) == 3  # knobs of speculation and seeds do not ask again
    (tmp_path / "mine.py").write_text("def score(): ...")
    users = config_of("dapo_tiny_cpu", f"reward.custom_reward_function.path={tmp_path}/mine.py")
    assert [list(vllm_command.taken_by_verl_and_vllm(users)) for _ in range(2)] == [[], []] and len(asked) == 4
    monkeypatch.undo()
    monkeypatch.setattr(vllm_command, "ACCEPTED", tmp_path / "none")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert list(vllm_command.taken_by_verl_and_vllm(config)) == []
