"""Trains an EAGLE3 head on a target's own responses, with training-time test (EAGLE-3, arXiv:2503.01840).

The head's entry of a position is made of what the target's layers gave there and of the token after; it predicts the
token after that. A draft goes on from the head's own output in place of the target's, which is unrolled in training:
step s of the unrolled passes takes the output of step s - 1, so that the head learns from what it will meet.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.functional import log_softmax, pad, softmax
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
    repeat_kv,
)

from recipe.draft_model.distil import Example, TrainingSettings, padded, train


@dataclass(frozen=True)
class HeadSettings(TrainingSettings):
    """How an EAGLE3 head is made.

    Attributes:
        unroll: passes of a draft that are trained, each on the output of the one before.
    """

    sequences: int = 8
    unroll: int = 5


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
    )


class Attention(torch.nn.Module):
    """Of the head's layer, over inputs twice as wide as its output: an embedding beside a state."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        size, self.head_size = config.hidden_size, config.head_dim
        self.groups = config.num_attention_heads // config.num_key_value_heads
        self.q_proj = torch.nn.Linear(2 * size, config.num_attention_heads * self.head_size, bias=False)
        self.k_proj = torch.nn.Linear(2 * size, config.num_key_value_heads * self.head_size, bias=False)
        self.v_proj = torch.nn.Linear(2 * size, config.num_key_value_heads * self.head_size, bias=False)
        self.o_proj = torch.nn.Linear(config.num_attention_heads * self.head_size, size, bias=False)

    def forward(self, inputs: torch.Tensor, rotary, earlier: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        """One unrolled step: a position sees step 0 up to where its draft begins, then one entry of each later step.

        Args:
            inputs: [texts, positions, 2 x hidden size].
            rotary: cosines and sines of the positions.
            earlier: keys and values of the steps before; this one's are added.
        """
        texts, count, _ = inputs.shape
        query, key, value = (
            made(inputs).view(texts, count, -1, self.head_size).transpose(1, 2)
            for made in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        earlier.append((repeat_kv(key, self.groups), repeat_kv(value, self.groups)))
        step = len(earlier) - 1
        keys, values = earlier[0]
        hidden = torch.ones(count, count, dtype=torch.bool).triu(1 - step)
        scores = (query @ keys.transpose(2, 3)).masked_fill(hidden, -torch.inf)
        later = [
            (_moved(keys, step - at), _moved(values, step - at)) for at, (keys, values) in enumerate(earlier[1:], 1)
        ]
        scores = torch.cat([scores, *((query * keys).sum(-1, keepdim=True) for keys, _ in later)], dim=-1)
        weights = softmax(scores * self.head_size**-0.5, dim=-1)
        attended = weights[..., :count] @ values
        for at, (_, of_step) in enumerate(later):
            attended = attended + weights[..., count + at, None] * of_step
        return self.o_proj(attended.transpose(1, 2).reshape(texts, count, -1))


def _moved(values: torch.Tensor, by: int) -> torch.Tensor:
    """Each position's value `by` positions later; positions are the last dimension but one."""
    return pad(values, (0, 0, by, 0))[..., : values.shape[-2], :]


class Layer(torch.nn.Module):
    """The head's only layer; its names are those of a saved head."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.self_attn, self.mlp = Attention(config), LlamaMLP(config)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self, name, LlamaRMSNorm(config.hidden_size, config.rms_norm_eps))

    def forward(self, embedded: torch.Tensor, states: torch.Tensor, rotary, earlier: list) -> torch.Tensor:
        inputs = torch.cat([self.input_layernorm(embedded), self.hidden_norm(states)], dim=-1)
        states = states + self.self_attn(inputs, rotary, earlier)
        return states + self.mlp(self.post_attention_layernorm(states))


class Head(torch.nn.Module):
    """An EAGLE3 head, begun with the target's last norm and output layer; it reads the target's embeddings."""

    def __init__(self, target: PreTrainedModel):
        super().__init__()
        self.config = config = head_config(target)
        self.layers_read = config.eagle_config["eagle_aux_hidden_state_layer_ids"]
        self.fc = torch.nn.Linear(len(self.layers_read) * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = Layer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.norm.load_state_dict(target.model.norm.state_dict())
        self.lm_head.weight.data.copy_(target.lm_head.weight.detach())
        self._rotary = LlamaRotaryEmbedding(config)  # without weights: in no saved head

    def forward(self, embedded: torch.Tensor, states: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """Logits of each unrolled step, [texts, positions, vocabulary]: of the token after next of a position.

        At step s a draft that began s positions earlier has come here; the first s positions mean nothing.

        Args:
            embedded: [texts, positions, hidden size], of the token after each position.
            states: [texts, positions, layers read x hidden size], the target's.
        """
        rotary = self._rotary(embedded, torch.arange(embedded.shape[1])[None])
        states, earlier, logits = self.fc(states), [], []
        for step in range(steps):
            states = self.midlayer(embedded, _moved(states, 1) if step else states, rotary, earlier)
            logits.append(self.lm_head(self.norm(states)))
        return logits

    def save_pretrained(self, folder: Path) -> None:
        """As EAGLE3's authors save theirs and vLLM loads it: `midlayer`, no embeddings."""
        self.config.save_pretrained(folder)
        save_file({name: value.contiguous() for name, value in self.state_dict().items()}, folder / "model.safetensors")


@torch.no_grad()
def read_target(target: PreTrainedModel, ids: torch.Tensor, layers: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the target gives for texts: its logits, and the inputs of `layers` beside each other, before its last norm.

    Args:
        ids: int64 [texts, tokens].
    """
    states: list[torch.Tensor] = []
    modules = [*target.model.layers, target.model.norm]
    with ExitStack() as hooks:
        for layer in layers:
            hook = modules[layer].register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
            hooks.callback(hook.remove)
        logits = target(input_ids=ids, use_cache=False).logits
    return logits, torch.cat(states, dim=-1)


def unrolled(target: PreTrainedModel, head: Head, ids: torch.Tensor, steps: int) -> tuple[list, torch.Tensor]:
    """The head's logits of each step over texts, and the target's of the same tokens.

    Returns:
        `steps` times [texts, tokens - 1, vocabulary], and once.
    """
    logits, states = read_target(target, ids, head.layers_read)
    with torch.no_grad():
        embedded = target.model.embed_tokens(ids[:, 1:])
    return head(embedded, states[:, :-1], steps), logits[:, 1:]


def train_head(
    target: PreTrainedModel,
    examples: list[Example],
    settings: HeadSettings,
    folder: Path,
    stop_after: Callable[[int], bool] = lambda step: False,
) -> tuple[Head, list[float]]:
    """Train a head; what an earlier call in `folder` has done is not done again.

    Args:
        stop_after: raise KeyboardInterrupt after a step, for tests of going on.

    Returns:
        The head, and the cross-entropy to the target in each step of this call, in nats a token, the mean over the
        unrolled passes.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        head = Head(target)
    target.eval()

    def loss_of(batch: list[Example]) -> torch.Tensor:
        ids, before_response = padded(batch)
        passes, wanted = unrolled(target, head, ids, settings.unroll)
        positions, loss = torch.arange(ids.shape[1] - 1), torch.zeros(())
        for step, logits in enumerate(passes):
            trained = before_response[:, 1:] & (positions >= step)
            loss = loss - (softmax(wanted[trained], -1) * log_softmax(logits[trained], -1)).sum(-1).mean()
        return loss / settings.unroll

    return head, train(head, loss_of, examples, settings, folder, stop_after)
