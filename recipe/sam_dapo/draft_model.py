"""`sam distil --assets DIR`: a draft model of a few layers for DIR/model, distilled from its own responses.

It goes into DIR/draft_model, with tokenizer, as transformers and vLLM load it: what speculation.draft_model takes. The
prompts are those of DIR/train.parquet; how many of its tokens held-out responses have too is said when it is built. A
second call with the same settings and target returns at once.

The student is the target with fewer layers, begun with the target's weights, and learns the target's distribution of
every response token (Hinton et al., 2015: the cross-entropy to the teacher's probabilities).
"""

# ruff: noqa: E402
import os

# Read when torch is loaded. Threads that spin while they wait take ten times a step's CPU time on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import copy
import hashlib
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import log_softmax, softmax
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from recipe.sam_dapo.assets import build_once
from recipe.sam_dapo.tiny.warm_start import deterministic
from sam.command import run_command
from sam.record.tokenizer import Tokenizer
from sam.tools.bench.prompts import read_prompts

FOLDER = "draft_model"
WIDTH = 128  # the tiny model's; Adam's rate falls as 1 / width (Yang et al., Tensor Programs V, arXiv:2203.03466)
MOST_LOGITS = 1 << 25  # numbers in a step's logits
LEAST = {"seed": 0, "prompts": 2}  # of the command's options; of others 1
POSITIONS = 8  # of a draft, of which acceptance is said
Example = tuple[list[int], list[int]]  # token ids of a prompt and of a response


@dataclass(frozen=True)
class Settings:
    """How a draft model is made."""

    layers: int = 1  # from 1 to the target's
    prompts: int = 96  # answered, each `samples` times; the responses to the last tenth of them are held out
    samples: int = 4
    response_tokens: int = 256  # of a response at most
    steps: int = 300  # of the optimizer, each on `sequences` responses
    sequences: int = 12
    learning_rate: float = 2e-3  # peak for states of up to WIDTH numbers, less for wider ones in proportion
    threads: int = 2  # of the CPU; results repeat exactly for a given count
    seed: int = 0


def sample_responses(target: PreTrainedModel, prompts: list[list[int]], settings: Settings) -> list[Example]:
    """Draw the target's responses to prompts, given as token ids, at temperature 1."""
    ends = target.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends or ())
    padding = next(iter(ends), 0)
    options = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "pad_token_id": padding,
        "max_new_tokens": settings.response_tokens,
        "num_return_sequences": settings.samples,
    }
    examples = []
    # Prompts at once. For padded ones transformers copies the KV cache of all heads at every token, which a wide target
    # feels more than reading its weights again.
    each = 16 if target.config.hidden_size <= WIDTH else 1
    with torch.random.fork_rng(devices=[]), torch.inference_mode():
        for begin in tqdm(range(0, len(prompts), each), desc="responses of the target", mininterval=5.0):
            batch = [torch.tensor(prompt) for prompt in prompts[begin : begin + each]]
            ids = pad_sequence(batch, True, padding, padding_side="left")
            masks = [torch.ones_like(prompt) for prompt in batch]
            real = pad_sequence(masks, True, 0, padding_side="left")
            torch.manual_seed(settings.seed + begin)
            texts = target.generate(input_ids=ids, attention_mask=real, **options)
            for i, text in enumerate(texts[:, ids.shape[1] :].tolist()):
                end = next((at + 1 for at, token in enumerate(text) if token in ends), len(text))
                examples.append((prompts[begin + i // settings.samples], text[:end]))
    return examples


def make_student(target: PreTrainedModel, layers: int) -> PreTrainedModel:
    """The target with its first layers only; ValueError if it has fewer."""
    config = copy.deepcopy(target.config)
    if not 1 <= layers <= config.num_hidden_layers:
        raise ValueError(f"layers={layers}: expected 1 to {config.num_hidden_layers}, the target's")
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    student = type(target)(config).to(target.dtype)
    student.load_state_dict(target.state_dict(), strict=False)
    student.generation_config = target.generation_config
    return student


def _states(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """What logits are computed from: [texts, tokens, hidden size]."""
    return model.base_model(input_ids=ids, use_cache=False).last_hidden_state


def loss_of(target, student, batch: list[Example], states: list[torch.Tensor]) -> torch.Tensor:
    """A student's mean cross-entropy to the target, whose `states` of each text are given, in nats a response token."""
    ids, before_response = padded(batch)
    places = before_response.flatten().nonzero()[:, 0]
    # A wide vocabulary's logits would take more than all layers: of so many tokens, spread over the batch, some do.
    most = min(len(places), max(1, MOST_LOGITS // target.config.vocab_size))
    chosen = places[torch.linspace(0, len(places) - 1, most).long()]
    with torch.no_grad():
        wanted = softmax(target.lm_head(pad_sequence(states, True).flatten(0, 1)[chosen]), dim=-1)
    given = log_softmax(student.lm_head(_states(student, ids).flatten(0, 1)[chosen]), dim=-1)
    return -(wanted * given).sum(-1).mean()


def train(target, student, examples: list[Example], settings: Settings) -> list[float]:
    """Train a student; the loss of each step."""
    peak = settings.learning_rate * min(1.0, WIDTH / student.config.hidden_size)
    optimizer = torch.optim.AdamW(student.parameters(), lr=peak, weight_decay=0.0)
    with torch.no_grad():  # once, as a pass of the target takes longer than all else
        states = [_states(target, padded([example])[0])[0] for example in examples]
    student.train()
    losses = []
    progress = tqdm(range(settings.steps), desc="distilling", mininterval=5.0)
    for step in progress:
        optimizer.param_groups[0]["lr"] = peak * (1.0 - 0.9 * step / settings.steps)
        chosen = np.random.default_rng([settings.seed, step]).integers(len(examples), size=settings.sequences)
        loss = loss_of(target, student, [examples[i] for i in chosen], [states[i] for i in chosen])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    student.eval()
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
def acceptance(student: PreTrainedModel, examples: Iterable[Example]) -> list[float]:
    """Share accepted at each position of a draft, of those accepted up to there; a draft begins before every token.

    A draft is accepted as far as it equals the response, so that the text before a draft token is the response's, and
    all drafts are read off whole texts.
    """
    accepted = torch.zeros(POSITIONS)
    tried = torch.zeros(POSITIONS)
    for example in examples:
        ids, before_response = padded([example])
        right = student.lm_head(_states(student, ids)).argmax(-1)[:, :-1] == ids[:, 1:]
        alive = before_response[:, :-1]  # by the token after which a draft begins
        for position in range(POSITIONS):
            alive = alive[:, : ids.shape[1] - 1 - position] & before_response[:, position:-1]
            tried[position] += alive.sum()
            alive = alive & right[:, position:]
            accepted[position] += alive.sum()
    return (accepted / tried.clamp(min=1)).tolist()


def prepare_drafter(assets: Path, settings: Settings) -> bool:
    """Puts a draft model for assets/model into assets, unless it is there; says whether it did. ValueError if there is
    no target or no prompts, or the folder holds something else."""
    target = assets / "model"
    prompts = assets / "train.parquet"
    for path in (target / "config.json", prompts):
        if not path.is_file():
            raise ValueError(f"no {path}: make model and data first, or name their folder with --assets")
    weights = sorted(target.glob("*.safetensors"))
    digests = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in weights}
    settled = asdict(settings) | {"target": digests}
    made_of = [Path(__file__), "torch", "transformers"]
    return build_once(assets / FOLDER, "draft model", settled, made_of, lambda folder: _build(folder, assets, settings))


def _build(folder: Path, assets: Path, settings: Settings) -> None:
    target = AutoModelForCausalLM.from_pretrained(assets / "model", local_files_only=True).float().eval()
    prompts = read_prompts(assets / "train.parquet", assets / "model", settings.prompts)
    with deterministic(settings.threads):
        student = make_student(target, settings.layers)
        examples = sample_responses(target, prompts, settings)
        trained = len(examples) - max(1, len(prompts) // 10) * settings.samples
        train(target, student, examples[:trained], settings)
        shares = acceptance(student, examples[trained:])
    student.save_pretrained(folder)
    Tokenizer(assets / "model").whole.save_pretrained(folder)
    listed = ", ".join(f"{share:.0%}" for share in shares)
    print(f"of {len(examples) - trained} held-out responses, by position of a draft, {listed} of its tokens are right")


def main(arguments: list[str] | None = None) -> int:
    shown = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(prog="sam distil", description=__doc__, formatter_class=shown)
    parser.add_argument("--assets", type=Path, required=True, help="folder with model/ and train.parquet")
    parser.add_argument("--layers", type=int, default=Settings.layers, help="of the draft model")
    parser.add_argument("--prompts", type=int, default=Settings.prompts, help="to answer, a tenth held out")
    parser.add_argument("--steps", type=int, default=Settings.steps, help="of the optimizer")
    parser.add_argument("--seed", type=int, default=Settings.seed, help="of responses and batches")
    options = vars(parser.parse_args(arguments))
    assets = options.pop("assets").absolute()
    for name, value in options.items():
        least = LEAST.get(name, 1)
        if value < least:
            parser.error(f"--{name} is {value}: expected at least {least}")

    def command() -> str:
        built = prepare_drafter(assets, Settings(**options))
        return f"draft model {'built' if built else 'found'} in {assets / FOLDER}"

    return run_command(command)


if __name__ == "__main__":
    sys.exit(main())
