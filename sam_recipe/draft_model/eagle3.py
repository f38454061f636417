"""Trains an EAGLE3 head on a target's own responses, with training-time test (EAGLE-3, arXiv:2503.01840).

The head's entry of a position is made of what the target's layers gave there and of the token after; it predicts the
token after that. A draft goes on from the head's own output in place of the target's, which is unrolled in training:
step s of the unrolled passes takes the output of step s - 1, so that the head learns from what it will meet.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.functional import pad
from transformers import DynamicCache, LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from sam_recipe.draft_model.distil import Settings


def layers_read(count: int) -> list[int]:
    """Layers of a target whose inputs a head reads; `count`, the number of layers, stands for what the last one gives.

    Those of EAGLE-3's authors and vLLM: a low, a middle and a high one; of a shallower target what it has of them.

    Example:
        >>> layers_read(36), layers_read(2)
        ([2, 18, 33], [0, 1, 2])
    """
    usual = [2, count // 2, count - 3]
    return usual if usual == sorted(set(usual)) and usual[0] >= 2 else sorted({0, count // 2, count})


def head_config(target: PreTrainedModel) -> LlamaConfig:
    """config.json of a head with the target's sizes and vocabulary, as vLLM's LlamaForCausalLMEagle3 reads it."""
    like = target.config
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "max_position_embeddings", "rms_norm_eps", "rope_parameters",
    )  # fmt: skip
    layers = layers_read(like.num_hidden_layers)
    return LlamaConfig(
        **{name: value for name in names if (value := getattr(like, name, None)) is not None},
        num_hidden_layers=1,
        draft_vocab_size=like.vocab_size,
        eagle_config={"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True},
        architectures=["LlamaForCausalLMEagle3"],
        tie_word_embeddings=False,
        dtype="float32",
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="sdpa",
    )


class Layer(torch.nn.Module):
    """The head's only layer, whose attention reads an embedding beside a state; its names are those of a saved head."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.self_attn, self.mlp = LlamaAttention(config, layer_idx=0), LlamaMLP(config)
        for name in ("q_proj", "k_proj", "v_proj"):
            size = getattr(self.self_attn, name).out_features
            setattr(self.self_attn, name, torch.nn.Linear(2 * config.hidden_size, size, bias=False))
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self, name, LlamaRMSNorm(config.hidden_size, config.rms_norm_eps))

    def forward(self, embedded: torch.Tensor, states: torch.Tensor, **attention) -> torch.Tensor:
        inputs = torch.cat([self.input_layernorm(embedded), self.hidden_norm(states)], dim=-1)
        states = states + self.self_attn(inputs, **attention)[0]
        return states + self.mlp(self.post_attention_layernorm(states))


class Head(torch.nn.Module):
    """An EAGLE3 head, begun with the target's last norm and output layer; it reads the target's embeddings."""

    name, folder, defaults = "EAGLE3 head", "eagle3_head", Settings(sequences=8)

    def __init__(self, target: PreTrainedModel, settings: Settings):
        super().__init__()
        self.config = config = head_config(target)
        self.layers_read = config.eagle_config["eagle_aux_hidden_state_layer_ids"]
        self._embed = target.get_input_embeddings().forward  # the target's: in no saved head
        self._rotary = LlamaRotaryEmbedding(config)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            self.fc = torch.nn.Linear(len(self.layers_read) * config.hidden_size, config.hidden_size, bias=False)
            self.midlayer = Layer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.norm.load_state_dict(target.model.norm.state_dict())
        self.lm_head.weight.data.copy_(target.lm_head.weight.detach())

    def forward(self, ids: torch.Tensor, states: torch.Tensor, passes: int) -> list[torch.Tensor]:
        """For each pass of a draft, what the logits of the token after each are computed from: [texts, tokens, hidden
        size].

        At pass s a draft that began s tokens earlier has come here; the first s + 1 tokens mean nothing. It sees the
        entries of pass 0 up to where it began, and one of each later pass.

        Args:
            ids: int64 [texts, tokens].
            states: [texts, tokens, layers read x hidden size or more], the target's.
        """
        with torch.no_grad():
            embedded = self._embed(ids[:, 1:])
        places = torch.arange(embedded.shape[1])
        behind = places[:, None] - places  # entries from a key to a query
        rotary, keys, found = self._rotary(embedded, places[None]), DynamicCache(), []
        states = self.fc(states[:, :-1, : self.fc.in_features])
        for pass_ in range(passes):
            if pass_:
                states = pad(states, (0, 0, 1, 0))[:, :-1]  # of the entry before
            seen = torch.cat([behind >= pass_, *(behind == pass_ - at for at in range(1, pass_ + 1))], dim=1)
            attention = {"position_embeddings": rotary, "past_key_values": keys, "attention_mask": seen}
            states = self.midlayer(embedded, states, **attention)
            found.append(pad(self.norm(states), (0, 0, 1, 0)))  # an entry predicts after the token behind it
        return found

    def save_pretrained(self, folder: Path) -> None:
        """As EAGLE3's authors save theirs and vLLM loads it: `midlayer`, no embeddings."""
        self.config.save_pretrained(folder)
        save_file({name: value.contiguous() for name, value in self.state_dict().items()}, folder / "model.safetensors")
