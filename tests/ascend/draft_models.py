"""Tiny targets, and heads that draft for them: EAGLE, EAGLE3, and an MTP layer of MiMo, whose attention is Qwen2's.

The targets' layers change little, so that the next token follows from the last one mostly: a head that knows nothing
but embeddings and output layer drafts well, and is rejected now and then.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.sam.engine.eagle_head import ReferenceHead, fit_output_layer, save_head

SIZE = 64
COMMON = {
    "vocab_size": 512, "hidden_size": SIZE, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": False, "initializer_range": 0.25,
}  # fmt: skip
WEAK = 0.02  # what the layers' outputs are multiplied by
IDENTITY = torch.eye(SIZE)


def save_target(folder: Path) -> Qwen3ForCausalLM:
    torch.manual_seed(3)
    network = _weakened(Qwen3ForCausalLM(Qwen3Config(**COMMON, head_dim=32)).float())
    network.save_pretrained(folder)
    return network.eval()


def save_eagle(folder: Path) -> None:
    """As EAGLE's authors save theirs: one layer without a norm before or after, no embeddings, no output layer."""
    torch.manual_seed(4)
    network = _weakened(LlamaForCausalLM(LlamaConfig(**COMMON | {"num_hidden_layers": 1})).float())
    network.save_pretrained(folder)
    own = {name.removeprefix("model."): value for name, value in load_file(folder / "model.safetensors").items()}
    weights = {
        name: value for name, value in own.items() if name.startswith("layers.") and "input_layernorm" not in name
    }
    weights["fc.weight"] = torch.cat([IDENTITY, 0.01 * torch.randn(SIZE, SIZE)], dim=1)  # embeddings, states
    save_file(weights, folder / "model.safetensors")


def save_eagle3(folder: Path, target: Qwen3ForCausalLM, texts: list[list[int]]) -> None:
    """With an output layer that is fitted to the target's `texts`."""
    save_head(SimpleNamespace(network=target), folder)
    head = Eagle3Head(target, folder)
    with torch.no_grad():
        states = torch.cat([head.states(text)[:-1] for text in texts])
    fit_output_layer(folder, states, torch.cat([torch.tensor(text[2:]) for text in texts]))


class Eagle3Head(ReferenceHead):
    """The saved head, computed with transformers."""

    def __init__(self, target: Qwen3ForCausalLM, folder: Path):
        super().__init__(SimpleNamespace(network=target), folder)

    def states(self, text: list[int]) -> torch.Tensor:
        """[tokens - 1, hidden size]: what the output layer reads, after each token but the first."""
        embedded = self.target.model.embed_tokens(torch.tensor(text))[1:]
        before_norm = self._layer(embedded, self._states(text)[:-1] @ self.weights["fc.weight"].T)
        return torch.nn.functional.rms_norm(before_norm, (SIZE,), self.weights["norm.weight"], 1e-6)


def save_mimo(folder: Path) -> None:
    """A target with an MTP layer, under the names of MiMo's weights."""
    torch.manual_seed(3)
    _weakened(Qwen2ForCausalLM(Qwen2Config(**COMMON)).float()).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    for name in [name for name in weights if name.startswith("model.layers.1.")]:
        weights[name.replace("model.layers.1.", "model.mtp_layers.0.")] = weights[name].clone()
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"model.mtp_layers.0.{name}.weight"] = torch.ones(SIZE)
    states = 0.03 * torch.randn(SIZE, SIZE)
    weights["model.mtp_layers.0.input_proj.weight"] = torch.cat([states, IDENTITY], dim=1)  # states, embeddings
    save_file(weights, folder / "model.safetensors")


def _weakened(network):
    with torch.no_grad():
        for layer in network.model.layers:
            layer.self_attn.o_proj.weight.mul_(WEAK)
            layer.mlp.down_proj.weight.mul_(WEAK)
    return network
