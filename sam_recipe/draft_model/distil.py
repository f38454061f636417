"""Distils a draft model of a few layers from a target's own responses; what training a head shares with that.

The student is the target with fewer layers, begun with the target's weights, and learns the target's distribution of
every response token (Hinton et al., 2015: the cross-entropy to the teacher's probabilities).
"""

import copy
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import log_softmax, softmax
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import PreTrainedModel

from sam_recipe.draft_model import WIDTH, Settings

MOST_LOGITS = 1 << 25  # numbers in a step's logits
POSITIONS = 8  # of a draft, of which acceptance is said
STATE, RESPONSES = "state.pt", "responses.pt"  # of a stopped call: model, optimizer and steps done; what was answered
Example = tuple[list[int], list[int]]
"""Token ids of a prompt and of a response."""


def sample_responses(
    target: PreTrainedModel, prompts: list[list[int]], settings: Settings, folder: Path
) -> list[Example]:
    """Draw the target's responses at temperature 1; those of an earlier call that are in `folder` are taken from there.

    Args:
        prompts: token ids of each prompt.
    """
    path = folder / RESPONSES
    done: list[Example] = torch.load(path, weights_only=True) if path.is_file() else []
    # Prompts at once. For padded ones transformers copies the KV cache of all heads at every token, which a wide target
    # feels more than reading its weights again.
    each = 16 if target.config.hidden_size <= WIDTH else 1
    with tqdm(total=len(prompts), desc="responses of the target", mininterval=5.0) as progress:
        progress.update(len(done) // settings.samples)
        for begin in range(len(done) // settings.samples, len(prompts), each):
            batch = prompts[begin : begin + each]
            done += _answer(target, batch, settings, settings.seed + begin)
            _save(done, path)
            progress.update(len(batch))
    return done


def _answer(target: PreTrainedModel, prompts: list[list[int]], settings: Settings, seed: int) -> list[Example]:
    longest, ends = max(map(len, prompts)), target.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    padding = next(iter(ends), 0)
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(seed)
        texts = target.generate(
            input_ids=torch.tensor([[padding] * (longest - len(prompt)) + prompt for prompt in prompts]),
            attention_mask=torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=settings.response_tokens,
            num_return_sequences=settings.samples,
            pad_token_id=padding,
        )
    examples = []
    for i, text in enumerate(texts[:, longest:].tolist()):
        end = next((at + 1 for at, token in enumerate(text) if token in ends), len(text))
        examples.append((prompts[i // settings.samples], text[:end]))
    return examples


class Student(torch.nn.Module):
    """The target with its first layers only; embeddings, norm and output layer are the target's.

    Raises:
        ValueError: the target has fewer layers.
    """

    name, folder, defaults, unused = "draft model", "draft_model", Settings(unroll=1), "unroll"
    layers_read = ()

    def __init__(self, target: PreTrainedModel, settings: Settings):
        super().__init__()
        layers, config = settings.layers, copy.deepcopy(target.config)
        if not 1 <= layers <= config.num_hidden_layers:
            raise ValueError(f"layers={layers}: expected 1 to {config.num_hidden_layers}, the target's")
        config.num_hidden_layers, self.config = layers, config
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
        self.model = type(target)(config).to(target.dtype)
        self.model.load_state_dict(target.state_dict(), strict=False)
        self.model.generation_config = target.generation_config
        self.lm_head, self.save_pretrained = self.model.lm_head, self.model.save_pretrained

    def forward(self, ids: torch.Tensor, _states: torch.Tensor, passes: int) -> list[torch.Tensor]:
        """As Head's; a language model's token depends on the text alone, wherever in a draft it comes."""
        return [self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state] * passes


@torch.no_grad()
def states_of(target: PreTrainedModel, layers: Iterable[int], ids: torch.Tensor) -> torch.Tensor:
    """The inputs of a target's `layers`, where one more than there are stands for its norm, and what the norm gives.

    Args:
        ids: int64 [texts, tokens].

    Returns:
        [texts, tokens, (layers + 1) x hidden size].
    """
    states, modules = [], [*target.base_model.layers, target.base_model.norm]
    with ExitStack() as hooks:
        for layer in layers:
            hook = modules[layer].register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
            hooks.callback(hook.remove)
        last = target.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return torch.cat([*states, last], dim=-1)


def loss_of(target, drafter, batch: list[Example], read: list[torch.Tensor], passes: int) -> torch.Tensor:
    """A drafter's mean cross-entropy to the target, in nats a response token and pass of a draft.

    Args:
        read: of each text what `states_of` gives.
    """
    ids, before_response = padded(batch)
    states, losses = pad_sequence(read, True), []
    for pass_, own in enumerate(drafter(ids, states, passes)):
        places = (before_response & (torch.arange(ids.shape[1]) > pass_)).flatten().nonzero()[:, 0]
        # A wide vocabulary's logits would take more than all layers: of so many tokens, spread over the batch, some do.
        most = min(len(places), max(1, MOST_LOGITS // target.config.vocab_size))
        chosen = places[torch.linspace(0, len(places) - 1, most).long()]
        with torch.no_grad():
            last = states.flatten(0, 1)[chosen, -target.config.hidden_size :]
            wanted = softmax(target.lm_head(last), dim=-1)
        found = log_softmax(drafter.lm_head(own.flatten(0, 1)[chosen]), dim=-1)
        losses.append(-(wanted * found).sum(-1).mean())
    return torch.stack(losses).mean()


def train(target, drafter, examples: list[Example], settings: Settings, folder: Path) -> list[float]:
    """Train a drafter, from where an earlier call in `folder` was stopped; the loss of each step of this call."""
    peak, first, losses = settings.learning_rate * min(1.0, WIDTH / drafter.config.hidden_size), 0, []
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=peak, weight_decay=0.0)
    if (folder / STATE).is_file():
        weights, state, first = torch.load(folder / STATE, weights_only=True)
        drafter.load_state_dict(weights)
        optimizer.load_state_dict(state)
    # Once, as a pass of the target takes longer than all else; and one by one: beside others a text's last bits depend
    # on them, and training that goes on would end elsewhere.
    read = [states_of(target, drafter.layers_read, padded([example])[0])[0] for example in examples]
    drafter.train()
    with tqdm(total=settings.steps, desc="distilling", mininterval=5.0) as progress:
        progress.update(first)
        for step in range(first, settings.steps):
            optimizer.param_groups[0]["lr"] = peak * (1.0 - 0.9 * step / settings.steps)
            chosen = np.random.default_rng([settings.seed, step]).integers(len(examples), size=settings.sequences)
            batch = [examples[i] for i in chosen], [read[i] for i in chosen]
            loss = loss_of(target, drafter, *batch, settings.unroll)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            progress.update()
            if (step + 1) % settings.save_steps == 0:
                _save((drafter.state_dict(), optimizer.state_dict(), step + 1), folder / STATE)
    drafter.eval()
    return losses


def padded(batch: list[Example]) -> tuple[torch.Tensor, torch.Tensor]:
    """Texts beside each other, padded on the right, where causal attention never looks: no mask is needed.

    Returns:
        int64 [texts, longest], token ids; and bool of that shape, whether a response's token comes next.
    """
    ids = pad_sequence([torch.tensor(prompt + response) for prompt, response in batch], True, 0)
    before_response = torch.zeros(ids.shape, dtype=torch.bool)
    for row, (prompt, response) in enumerate(batch):
        before_response[row, len(prompt) - 1 : len(prompt) + len(response) - 1] = True
    return ids, before_response


@torch.no_grad()
def acceptance(target: PreTrainedModel, drafter: torch.nn.Module, examples: Iterable[Example]) -> list[float]:
    """Share accepted at each position of a draft, of those accepted up to there; a draft begins before every token.

    A draft is accepted as far as it equals the response, so that the text before a draft token is the response's, and
    all drafts are read off whole texts.
    """
    accepted, tried = torch.zeros(POSITIONS), torch.zeros(POSITIONS)
    for example in examples:
        ids, before_response = padded([example])
        alive = before_response[:, :-1]  # by the token after which a draft begins
        for position, states in enumerate(drafter(ids, states_of(target, drafter.layers_read, ids), POSITIONS)):
            tokens = drafter.lm_head(states).argmax(-1)
            alive = alive[:, : ids.shape[1] - 1 - position] & before_response[:, position:-1]
            tried[position] += alive.sum()
            alive = alive & (tokens[:, position:-1] == ids[:, position + 1 :])
            accepted[position] += alive.sum()
    return (accepted / tried.clamp(min=1)).tolist()


def _save(content: Any, path: Path) -> None:
    """Whole or not at all."""
    torch.save(content, written := path.with_suffix(".new"))
    written.replace(path)
