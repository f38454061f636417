"""Distils a draft model of a few layers from a target's own responses.

The student is the target with fewer layers, begun with the target's weights, and learns the target's distribution of
every response token (Hinton et al., 2015: the cross-entropy to the teacher's probabilities). Drafts are greedy, and are
accepted with the target's probability of that token.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import log_softmax, softmax
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from recipe.launch.progress import progress_bar

WIDTH = 128  # the tiny model's; Adam's rate falls as 1 / width (Yang et al., Tensor Programs V, arXiv:2203.03466)
MOST_LOGITS = 1 << 25  # numbers in a step's logits
STATE = "state.pt"  # model, optimizer and steps done, beside the responses
RESPONSES = "responses.pt"


@dataclass(frozen=True)
class TrainingSettings:
    """How a trained drafter is made, of either kind.

    Attributes:
        prompts: prompts answered, each `samples` times, by at most `response_tokens` tokens; the responses to the last
            tenth of them are held out.
        steps: optimizer steps, each on `sequences` responses.
        learning_rate: peak for states of up to WIDTH numbers, less for wider ones in proportion; it falls linearly to a
            tenth.
        save_steps: steps after which training can go on from where it was stopped.
        threads: CPU threads; results repeat exactly for a given count.
    """

    prompts: int = 96
    samples: int = 4
    response_tokens: int = 256
    steps: int = 300
    sequences: int = 12
    learning_rate: float = 2e-3
    save_steps: int = 50
    threads: int = 2
    seed: int = 0


@dataclass(frozen=True)
class DistilSettings(TrainingSettings):
    """How a draft model is made.

    Attributes:
        layers: of the draft model, from 1 to the target's.
    """

    layers: int = 1


Example = tuple[list[int], list[int]]
"""Token ids of a prompt and of a response."""


def sample_responses(
    target: PreTrainedModel, prompts: list[list[int]], settings: TrainingSettings, folder: Path
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
    with progress_bar(total=len(prompts), desc="responses of the target") as progress:
        progress.update(len(done) // settings.samples)
        for begin in range(len(done) // settings.samples, len(prompts), each):
            batch = prompts[begin : begin + each]
            done += _answer(target, batch, settings, settings.seed + begin)
            _save(done, path)
            progress.update(len(batch))
    return done


def _answer(target: PreTrainedModel, prompts: list[list[int]], settings: TrainingSettings, seed: int) -> list[Example]:
    longest, ends = max(map(len, prompts)), target.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    padding = next(iter(ends), 0)
    ids = torch.tensor([[padding] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        torch.manual_seed(seed)
        texts = target.generate(
            input_ids=ids,
            attention_mask=mask,
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


def student_of(target: PreTrainedModel, layers: int) -> PreTrainedModel:
    """The target with its first `layers` layers only; embeddings, norm and output layer are the target's.

    Raises:
        ValueError: the target has fewer layers.
    """
    if not 1 <= layers <= target.config.num_hidden_layers:
        raise ValueError(f"layers={layers}: expected 1 to {target.config.num_hidden_layers}, the target's")
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    student = type(target)(config).to(target.dtype)
    student.load_state_dict(target.state_dict(), strict=False)
    student.generation_config = target.generation_config
    return student


def distil(
    target: PreTrainedModel,
    examples: list[Example],
    settings: DistilSettings,
    folder: Path,
    stop_after: Callable[[int], bool] = lambda step: False,
) -> tuple[PreTrainedModel, list[float]]:
    """Train a draft model; what an earlier call in `folder` has done is not done again.

    Args:
        stop_after: raise KeyboardInterrupt after a step, for tests of going on.

    Returns:
        The student, and the mean cross-entropy to the target in each step of this call, in nats a token.
    """
    student = student_of(target, settings.layers)
    states_of = _target_states(target)

    def loss_of(batch: list[Example]) -> torch.Tensor:
        ids, trained = padded(batch)
        of_target = states_of(batch)
        own = student.base_model(input_ids=ids, use_cache=False).last_hidden_state[trained]
        # A wide vocabulary's logits would take more than all layers: of so many tokens, spread over the batch, some do.
        most = max(1, MOST_LOGITS // student.config.vocab_size)
        chosen = torch.linspace(0, len(own) - 1, min(len(own), most)).long()
        with torch.no_grad():
            wanted = softmax(target.get_output_embeddings()(of_target[chosen]), dim=-1)
        found = log_softmax(student.get_output_embeddings()(own[chosen]), dim=-1)
        return -(wanted * found).sum(-1).mean()

    return student, train(student, loss_of, examples, settings, folder, stop_after)


def _target_states(target: PreTrainedModel) -> Callable[[list[Example]], torch.Tensor]:
    """A function of examples that gives what the target's logits of their response tokens are computed from.

    Its result is [tokens, hidden size], in the order of `padded`. Every example is read once: they come again and
    again, and a pass of the target takes longer than all else of a step.
    """
    target.eval()
    known: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def states_of(batch: list[Example]) -> torch.Tensor:
        for example in batch:
            if id(example) not in known:
                # Alone: beside others its last bits depend on them, and training that goes on would end elsewhere.
                ids, trained = padded([example])
                states = target.base_model(input_ids=ids, use_cache=False).last_hidden_state
                known[id(example)] = states[trained]
        return torch.cat([known[id(example)] for example in batch])

    return states_of


def train(
    student: torch.nn.Module,
    loss_of: Callable[[list[Example]], torch.Tensor],
    examples: list[Example],
    settings: TrainingSettings,
    folder: Path,
    stop_after: Callable[[int], bool] = lambda step: False,
) -> list[float]:
    """Train `student`, from where an earlier call in `folder` was stopped; the loss of each step of this call."""
    peak = settings.learning_rate * min(1.0, WIDTH / student.config.hidden_size)
    optimizer = torch.optim.AdamW([one for one in student.parameters() if one.requires_grad], lr=peak, weight_decay=0.0)
    first = _resume(folder / STATE, student, optimizer)
    losses = []
    student.train()
    with progress_bar(total=settings.steps, desc="distilling") as progress:
        progress.update(first)
        for step in range(first, settings.steps):
            for group in optimizer.param_groups:
                group["lr"] = peak * (1.0 - 0.9 * step / settings.steps)
            loss = loss_of(_batch(examples, settings, step))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(loss.item())
            progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
            progress.update()
            if (step + 1) % settings.save_steps == 0:
                _save((student.state_dict(), optimizer.state_dict(), step + 1), folder / STATE)
            if stop_after(step):
                raise KeyboardInterrupt
    student.eval()
    return losses


def _batch(examples: list[Example], settings: TrainingSettings, step: int) -> list[Example]:
    chosen = np.random.default_rng([settings.seed, step]).integers(len(examples), size=settings.sequences)
    return [examples[i] for i in chosen]


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


def _resume(path: Path, student, optimizer) -> int:
    """Steps that are done."""
    if not path.is_file():
        return 0
    weights, state, steps = torch.load(path, weights_only=True)
    student.load_state_dict(weights)
    optimizer.load_state_dict(state)
    return steps


def _save(content, path: Path) -> None:
    """Whole or not at all."""
    written = path.with_suffix(".new")
    torch.save(content, written)
    written.replace(path)
