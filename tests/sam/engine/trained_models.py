"""For a tiny target a draft model, its first layer, and an EAGLE3 head: random weights, and an output layer that may be
fitted to the target's text."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

LAYERS = [0, 1, 2]  # of the target, whose inputs the head reads; 2: what the last layer gives
DRAFT_VOCABULARY = 200


def save_draft_model(target, path: Path) -> SimpleNamespace:
    """The target's first layer."""
    config = copy.deepcopy(target.network.config)
    config.num_hidden_layers = 1
    config.layer_types = config.layer_types[:1]
    network = type(target.network)(config)
    network.load_state_dict(target.network.state_dict(), strict=False)
    network.save_pretrained(path)
    return SimpleNamespace(path=str(path), network=network.eval())


def save_head(target, path: Path) -> None:
    """As EAGLE3's authors save theirs: one layer `midlayer`, no embeddings, and a vocabulary of its own (`d2t`)."""
    torch.manual_seed(1)
    like = target.network.config
    size, heads, groups, head = like.hidden_size, like.num_attention_heads, like.num_key_value_heads, like.head_dim
    shapes = {
        "midlayer.self_attn.q_proj": (heads * head, 2 * size),
        "midlayer.self_attn.k_proj": (groups * head, 2 * size),
        "midlayer.self_attn.v_proj": (groups * head, 2 * size),
        "midlayer.self_attn.o_proj": (size, heads * head),
        "midlayer.mlp.gate_proj": (like.intermediate_size, size),
        "midlayer.mlp.up_proj": (like.intermediate_size, size),
        "midlayer.mlp.down_proj": (size, like.intermediate_size),
        "fc": (size, len(LAYERS) * size),
        "lm_head": (DRAFT_VOCABULARY, size),
    }
    weights = {f"{name}.weight": torch.randn(shape) * shape[1] ** -0.5 for name, shape in shapes.items()}
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        weights[f"{name}.weight"] = torch.ones(size)
    tokens = torch.randperm(like.vocab_size)[:DRAFT_VOCABULARY].sort().values
    weights["d2t"] = tokens - torch.arange(DRAFT_VOCABULARY)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": DRAFT_VOCABULARY,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": LAYERS, "use_aux_hidden_state": True},
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
    }
    copied = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    copied += ("head_dim", "max_position_embeddings")
    config |= {name: getattr(like, name) for name in copied}
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file(weights, path / "model.safetensors")


@torch.no_grad()
def fit_output_layer(target, path: Path, texts: list[list[int]]) -> None:
    """Least squares from what the head gives to the tokens after, of the target's `texts`."""
    head = ReferenceHead(target, path)
    weights, states = head.weights, torch.cat([head.states(text)[:-1] for text in texts])
    tokens = torch.cat([torch.tensor(text[2:]) for text in texts])
    known = weights["d2t"] + torch.arange(DRAFT_VOCABULARY)
    wanted, inputs = (tokens[:, None] == known).double(), states.double()
    ridge = inputs.T @ inputs + 0.1 * torch.eye(inputs.shape[1], dtype=torch.float64)
    weights["lm_head.weight"] = torch.linalg.solve(ridge, inputs.T @ wanted).T.float().contiguous()
    save_file(weights, path / "model.safetensors")


class ReferenceHead:
    """Drafts of a saved head after EAGLE-3's paper (arXiv:2503.01840), over the whole text, without a cache."""

    def __init__(self, target, path: Path):
        self.target, self.config = target.network, target.network.config
        self.weights = load_file(path / "model.safetensors")
        self.weights.setdefault("d2t", torch.zeros(self.config.vocab_size, dtype=torch.int64))

    def draft(self, text: list[int], count: int) -> list[int]:
        """The most probable token after `text`, and after each drafted one: `count` of them."""
        weights, drafted = self.weights, []
        embedded, states = self._inputs(text)
        for _ in range(count):
            before_norm = self._layer(embedded, states)
            last = before_norm[-1:]
            logits = _normed(last, weights["norm.weight"]) @ weights["lm_head.weight"].T
            place = int(logits.argmax())
            drafted.append(place + int(weights["d2t"][place]))
            embedded = torch.cat([embedded, self.target.model.embed_tokens(torch.tensor(drafted[-1:]))])
            states = torch.cat([states, last])
        return drafted

    def states(self, text: list[int]) -> torch.Tensor:
        """[tokens - 1, hidden size]: what the output layer reads, after each token but the first."""
        return _normed(self._layer(*self._inputs(text)), self.weights["norm.weight"])

    def _inputs(self, text: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings of all tokens but the first, and the states before them: what comes out of the target's embeddings
        and of each layer, before the last norm."""
        kept = []
        hook = self.target.model.norm.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0][0]))
        found = self.target(torch.tensor([text]), output_hidden_states=True).hidden_states
        hook.remove()
        states = torch.cat([found[0][0], found[1][0], kept[0]], dim=-1)[:-1] @ self.weights["fc.weight"].T
        return self.target.model.embed_tokens(torch.tensor(text))[1:], states

    def _layer(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        weights = {name.removeprefix("midlayer."): value for name, value in self.weights.items()}
        length, size = len(states), self.config.head_dim
        inputs = torch.cat(
            [_normed(embedded, weights["input_layernorm.weight"]), _normed(states, weights["hidden_norm.weight"])], -1
        )
        query, key, value = (
            (inputs @ weights[f"self_attn.{name}_proj.weight"].T).view(1, length, -1, size).transpose(1, 2)
            for name in "qkv"
        )
        rope = LlamaRotaryEmbedding(LlamaConfig(head_dim=size, hidden_size=self.config.hidden_size))
        query, key = apply_rotary_pos_emb(query, key, *rope(query, torch.arange(length)[None]))
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        attended = attended.transpose(1, 2).reshape(length, -1) @ weights["self_attn.o_proj.weight"].T
        states = states + attended
        inputs = _normed(states, weights["post_attention_layernorm.weight"])
        gate = torch.nn.functional.silu(inputs @ weights["mlp.gate_proj.weight"].T)
        return states + (gate * (inputs @ weights["mlp.up_proj.weight"].T)) @ weights["mlp.down_proj.weight"].T


def _normed(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
