"""The warm start's result, shipped in `warm_start.safetensors`: training takes one to four minutes.

`python -m recipe.sam_dapo.tiny.ship` makes the file.
"""

import hashlib
import json
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from recipe.sam_dapo.tiny.model import ModelSettings
from recipe.sam_dapo.tiny.task import Problem, TaskSettings
from recipe.sam_dapo.tiny.tokenizer import build_tokenizer
from recipe.sam_dapo.tiny.warm_start import WarmStartSettings, draw_batches

FILE = Path(__file__).with_name("warm_start.safetensors")
COMPARED_BATCHES = 32  # what the first of them hold tells other tasks, tokenizers and validation sets apart


def fingerprint(
    model: ModelSettings, task: TaskSettings, settings: WarmStartSettings, excluded: list[Problem], seed: int
) -> str:
    """Hash what a warm start learns from: its settings, what it leaves out, and the tokens of its first batches."""
    digest = hashlib.sha256(json.dumps([asdict(model), asdict(task), asdict(settings), seed]).encode())
    digest.update(repr(excluded).encode())
    batches = draw_batches(build_tokenizer(), task, set(excluded), seed + 1, settings.tokens_per_step)
    for inputs, _targets in islice(batches, COMPARED_BATCHES):
        digest.update(inputs.numpy().tobytes())
    return digest.hexdigest()


def shipped_weights(wanted: str) -> dict[str, torch.Tensor] | None:
    """The weights that a warm start of this fingerprint gives; None where the file holds another's."""
    with safe_open(FILE, "pt") as file:
        if file.metadata()["fingerprint"] != wanted:
            return None
        return {name: file.get_tensor(name) for name in file.keys()}


def write(model: torch.nn.Module, made_of: str) -> None:
    """Write a trained model's weights to the file."""
    weights = {name: weight.detach() for name, weight in model.named_parameters()}  # tied ones once
    save_file(weights, FILE, {"fingerprint": made_of})
