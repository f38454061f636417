"""verl and vLLM are asked before anything starts, and what they say is one line in their words."""

import pytest
from transformers import AutoConfig, Qwen3Config

from recipe.sam_dapo.launch import environment
from recipe.sam_dapo.launch.config import ConfigError, compose_config
from recipe.sam_dapo.preflight import vllm_command
from recipe.sam_dapo.tiny.tokenizer import build_tokenizer

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
VLLM = f"{ROLLOUT}.engine_kwargs.vllm"
REDUCED = f"+{VLLM}.additional_config.enable_reduce_sample=true"


@pytest.fixture
def model(tmp_path, monkeypatch):
    """As recipe.sam_dapo.tiny.assets builds it but without weights, which nothing here reads."""
    for name, value in (environment.OFFLINE | environment.CPU).items():
        monkeypatch.setenv(name, value)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = Qwen3Config(**sizes, max_position_embeddings=2048, architectures=["Qwen3ForCausalLM"])
    model.save_pretrained(tmp_path / "model")
    build_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def here(model, *overrides, name="dapo_tiny_cpu"):
    config = compose_config(name, [f"actor_rollout_ref.model.path={model}", *overrides])
    return list(vllm_command.what_verl_and_vllm_say(config))


TINY, CLUSTER = "dapo_tiny_cpu", "dapo_qwen3_32b"
# Config, who refuses, its words, and the override.
REFUSED = [
    (TINY, "vllm", "max_num_seqs", f"+{VLLM}.max_num_seqs=-4"),
    (TINY, "vllm", "max_model_len", f"{ROLLOUT}.max_model_len=99999"),
    (TINY, "vllm", "max-number-of-seqs", f"+{VLLM}.max_number_of_seqs=3"),
    (TINY, "verl", "Invalid loss_agg_mode: token", f"{ACTOR}.loss_agg_mode=token"),
    (TINY, "verl", "ofload", f"+{ACTOR}.fsdp_config.ofload=1"),
    (TINY, "verl", "advantage estimator simply: grop", "algorithm.adv_estimator=grop"),
    (TINY, "verl", "Unsupported loss mode: vanila", f"{ACTOR}.policy_loss.loss_mode=vanila"),
    (TINY, "verl", "trainer.logger=tensorbord is none of wandb", "trainer.logger=[console,tensorbord]"),
    (CLUSTER, "vllm", "FULLL", f"{VLLM}.compilation_config.cudagraph_mode=FULLL"),
    (CLUSTER, "vllm", "enable_reduce_sample=True: it changes what is sampled", REDUCED),
]


@pytest.mark.parametrize(("name", "who", "said", "override"), REFUSED)
def test_what_verl_or_vllm_refuses_is_one_line_in_its_words(model, name, who, said, override):
    (line,) = here(model, override, name=name)
    assert line.endswith(f"[config.{who}]") and said in line and "\n" not in line


def test_what_the_plugin_would_refuse_in_the_engine_and_a_tokenizer_that_does_not_load(model):
    assert here(model) == here("/no/such/folder") == []
    recurrent = model.parent / "recurrent"
    AutoConfig.for_model("qwen3_next", architectures=["Qwen3NextForCausalLM"]).save_pretrained(recurrent)
    (line,) = here(recurrent, f"{ROLLOUT}.enable_prefix_caching=false")  # which vLLM refuses with it on some CPUs
    assert "a model with recurrent layers" in line
    (model / "tokenizer.json").write_text('{"model": {')
    with pytest.raises(ConfigError, match=r"\[config.verl\]$"):
        vllm_command.check(compose_config("dapo_tiny_cpu", [f"actor_rollout_ref.model.path={model}"]))
