"""Models whose layers keep a state of the text are refused with drafts before an engine loads one."""

import pytest
from transformers import AutoConfig
from vllm.config import ModelConfig

from sam.vllm.plugin import check_recurrent_state

# Architecture by transformers' name of it: vLLM's class, and further fields of its config.
RECURRENT = {
    "qwen3_next": ("Qwen3NextForCausalLM", {}),
    "mamba2": ("Mamba2ForCausalLM", {}),
    "lfm2": ("Lfm2ForCausalLM", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}),
}
SETTINGS = {"skip_tokenizer_init": True, "dtype": "bfloat16"}
OTHERS = {
    "qwen3": ("Qwen3ForCausalLM", {}),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", {"num_hidden_layers": 1, "layer_types": ["attention"]}),
}


@pytest.fixture(autouse=True)
def without_further_processes(monkeypatch):
    """vLLM looks at a model's class in one that imports vLLM once more."""
    monkeypatch.setattr("vllm.model_executor.models.registry._run_in_subprocess", lambda function: function())


def save_config(folder, name, architecture, fields) -> str:
    AutoConfig.for_model(name, architectures=[architecture], **fields).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", RECURRENT)
def test_drafters_that_may_pause_are_refused(tmp_path, name):
    model = ModelConfig(save_config(tmp_path, name, *RECURRENT[name]), **SETTINGS)
    for method in ("custom_class", "ngram", "ngram_gpu", "suffix", "draft_model", "eagle3"):
        with pytest.raises(ValueError, match=f"no drafts for {name}, .*set speculation=off"):
            check_recurrent_state(model, method)
    for method in (None, "mtp"):
        check_recurrent_state(model, method)


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_pass(tmp_path, name):
    check_recurrent_state(ModelConfig(save_config(tmp_path, name, *OTHERS[name]), **SETTINGS), "ngram")
