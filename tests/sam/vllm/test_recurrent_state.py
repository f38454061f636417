"""Models whose layers keep a state of the text are refused with drafts before an engine loads one."""

import pytest
from transformers import AutoConfig
from vllm.config import ModelConfig

from sam.vllm.plugin import check_recurrent_state, register

# Architecture by transformers' name of it: vLLM's class, what its layers are called, and further fields of its config.
RECURRENT = {
    "qwen3_next": ("Qwen3NextForCausalLM", "linear_attention", {}),
    "qwen3_5_text": ("Qwen3_5ForCausalLM", "linear_attention", {}),
    "nemotron_h": ("NemotronHForCausalLM", "mamba", {}),
    "mamba2": ("Mamba2ForCausalLM", "mamba", {}),
    "falcon_h1": ("FalconH1ForCausalLM", "hybrid", {}),
    "lfm2": ("Lfm2ForCausalLM", "conv", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}),
}
SETTINGS = {"skip_tokenizer_init": True, "dtype": "bfloat16"}
OTHERS = {
    "qwen3": ("Qwen3ForCausalLM", {}),
    "gemma3_text": ("Gemma3ForCausalLM", {}),
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
def test_drafters_that_may_pause_are_refused_by_the_kind_of_layers(tmp_path, name):
    architecture, layers, fields = RECURRENT[name]
    model = ModelConfig(save_config(tmp_path, name, architecture, fields), **SETTINGS)
    for method in ("custom_class", "ngram", "ngram_gpu", "suffix", "draft_model", "eagle3"):
        with pytest.raises(ValueError, match=f"a model with {layers} layers.*set speculation=off"):
            check_recurrent_state(model, method)
    for method in (None, "mtp"):
        check_recurrent_state(model, method)


@pytest.mark.parametrize("name", OTHERS)
def test_other_models_pass(tmp_path, name):
    check_recurrent_state(ModelConfig(save_config(tmp_path, name, *OTHERS[name]), **SETTINGS), "ngram")


@pytest.mark.engine
def test_an_engine_does_not_load_such_a_model(tmp_path, monkeypatch):
    from vllm import LLM

    from tests.sam.engine.tiny_engine import NGRAM, SAM

    register()
    folder = save_config(tmp_path, "qwen3_next", "Qwen3NextForCausalLM", {"num_hidden_layers": 4})
    for asked in (SAM, NGRAM):
        with pytest.raises(ValueError, match="linear_attention layers"):
            LLM(
                folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=64,
                enforce_eager=True, speculative_config=dict(asked), additional_config={"speculation": {}},
            )  # fmt: skip
