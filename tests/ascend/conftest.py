"""These tests need their own environment: bash scripts/test.sh --ascend."""

import importlib.util
from types import SimpleNamespace

import pytest

from tests.ascend.engines import VOCABULARY, prompts_and_lengths

if importlib.util.find_spec("vllm_ascend") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """A folder with two tiny models, `dense` and `experts`, and an EAGLE3 head for the first, `head`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    from tests.sam.engine.trained_models import fit_output_layer, save_head

    common = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048,
        "tie_word_embeddings": False, "initializer_range": 0.25,
    }  # fmt: skip
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    folder = tmp_path_factory.mktemp("models")
    torch.manual_seed(3)
    dense = Qwen3ForCausalLM(Qwen3Config(**common)).float()
    dense.save_pretrained(folder / "dense")
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **experts)).float().save_pretrained(folder / "experts")
    target = SimpleNamespace(network=dense.eval())
    save_head(target, folder / "head")
    asked = [(torch.tensor([prompt]), tokens) for prompt, tokens in prompts_and_lengths("mixed", 14)]
    texts = [dense.generate(prompt, max_new_tokens=tokens, do_sample=False)[0].tolist() for prompt, tokens in asked]
    fit_output_layer(target, folder / "head", texts)
    return folder
