"""For a tiny target a draft model, its first layer, and an EAGLE3 head: random weights, and an output layer that may be
fitted to the target's text."""

import copy
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file
from torch.nn import Linear
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding

LAYERS = [0, 1, 2]  # of the target, whose inputs the head reads; 2: what the last layer gives
DRAFT_VOCABULARY = 200
COPIED = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
WEIGHTS = "model.safetensors"


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
    torch.manual_seed(1)
    head = Head(target)
    tokens = torch.randperm(head.config.vocab_size)[:DRAFT_VOCABULARY].sort().values
    head.d2t.copy_(tokens - torch.arange(DRAFT_VOCABULARY))
    head.config.save_pretrained(path)
    save_file(head.state_dict(), path / WEIGHTS)


@torch.no_grad()
def fit_output_layer(target, path: Path, texts: list[list[int]]) -> None:
    """Least squares from what the head gives to the tokens after, of the target's `texts`."""
    head = load_head(target, path)
    states = torch.cat([head.states(text)[:-1] for text in texts]).double()
    tokens = torch.cat([torch.tensor(text[2:]) for text in texts])
    wanted = (tokens[:, None] == head.d2t + torch.arange(DRAFT_VOCABULARY)).double()
    ridge = states.T @ states + 0.1 * torch.eye(states.shape[1], dtype=torch.float64)
    head.lm_head.weight.copy_(torch.linalg.solve(ridge, states.T @ wanted).T)
    save_file(head.state_dict(), path / WEIGHTS)


def load_head(target, path: Path) -> "Head":
    head = Head(target)
    head.load_state_dict(load_file(path / WEIGHTS))
    return head


class Head(torch.nn.Module):
    """A head as EAGLE-3's paper (arXiv:2503.01840) and authors have it, over the whole text, without a cache: one layer
    `midlayer`, no embeddings, and a vocabulary of its own (`d2t`)."""

    def __init__(self, target):
        super().__init__()
        self.target, like = target, target.network.config
        size, more = like.hidden_size, {"eagle_aux_hidden_state_layer_ids": LAYERS, "use_aux_hidden_state": True}
        self.config = LlamaConfig(
            **{name: getattr(like, name) for name in (*COPIED, "max_position_embeddings")},
            architectures=["LlamaForCausalLMEagle3"],
            num_hidden_layers=1,
            draft_vocab_size=DRAFT_VOCABULARY,
            eagle_config=more,
            dtype="float32",
            attn_implementation="sdpa",
        )
        self.midlayer, self.rope = LlamaDecoderLayer(self.config, 0), LlamaRotaryEmbedding(self.config)
        self.midlayer.hidden_norm, self.norm = LlamaRMSNorm(size), LlamaRMSNorm(size)
        attention = self.midlayer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):  # of the embedding and the state beside it
            setattr(attention, name, Linear(2 * size, getattr(attention, name).out_features, bias=False))
        self.fc = Linear(len(LAYERS) * size, size, bias=False)
        self.lm_head = Linear(size, DRAFT_VOCABULARY, bias=False)
        self.register_buffer("d2t", torch.zeros(DRAFT_VOCABULARY, dtype=torch.int64))

    @torch.no_grad()
    def draft(self, text: list[int], count: int) -> list[int]:
        """The most probable token after `text`, and after each drafted one: `count` of them."""
        drafted, (embedded, states) = [], self._inputs(text)
        for _ in range(count):
            last = self._layer(embedded, states)[-1:]
            place = int(self.lm_head(self.norm(last)).argmax())
            drafted.append(place + int(self.d2t[place]))
            embedded = torch.cat([embedded, self.target.network.model.embed_tokens(torch.tensor(drafted[-1:]))])
            states = torch.cat([states, last])
        return drafted

    def states(self, text: list[int]) -> torch.Tensor:
        """[tokens - 1, hidden size]: what the output layer reads, after each token but the first."""
        return self.norm(self._layer(*self._inputs(text)))

    def _inputs(self, text: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Embeddings of all tokens but the first, and the states before them: what comes out of the target's embeddings
        and of each layer, before the last norm."""
        kept, model = [], self.target.network.model
        hook = model.norm.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0][0]))
        found = self.target.network(torch.tensor([text]), output_hidden_states=True).hidden_states
        hook.remove()
        states = torch.cat([found[0][0], found[1][0], kept[0]], dim=-1)[:-1]
        return model.embed_tokens(torch.tensor(text))[1:], self.fc(states)

    def _layer(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        layer, positions = self.midlayer, torch.arange(len(states))[None]
        inputs = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(states)], dim=-1)[None]
        attended, _ = layer.self_attn(inputs, self.rope(inputs, positions))
        states = states + attended[0]
        return states + layer.mlp(layer.post_attention_layernorm(states))
