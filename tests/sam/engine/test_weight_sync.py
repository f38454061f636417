"""Real engines with vLLM's packed kernel in all linear layers: tokens after weight syncs. With drafts they
are in test_compiled.py."""

import numpy as np
import pytest
import torch

from sam.verify.exact import rng_key, uniforms
from sam.vllm import row_classes
from tests.sam.engine.tiny_engine import Engine, save_model

pytestmark = pytest.mark.engine

PROMPTS = [[row, row + 1, 7] for row in range(12)]


def changed(network, path):
    """The model after a few steps of something like training, saved too; its weights."""
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    network.save_pretrained(path)
    weights = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    network.load_state_dict(before)
    return weights


def buckets(weights):
    """As verl sends them: in several parts, without the head where it is tied."""
    items = list(weights.items())
    if any(name == "lm_head.weight" and tensor.equal(weights["model.embed_tokens.weight"]) for name, tensor in items):
        items = [(name, tensor) for name, tensor in items if name != "lm_head.weight"]
    return items[::2], items[1::2]


def process(runner):
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    process_weights_after_loading(runner.model, runner.model_config, runner.device)


def as_verl(runner, weights, path):
    """vLLMColocateWorkerExtension.update_weights_from_ipc of verl 0.9.1: parts, then processing, once."""
    by_load_weights(runner, weights, path)
    process(runner)


def by_load_weights(runner, weights, path):
    for part in buckets(weights):
        runner.model.load_weights(iter(part))


def processed_only(runner, weights, path):
    """Written past `load_weights`, as verl's own quantised and buffer updates; processed then."""
    type(runner.model).load_weights(runner.model, iter(sum(buckets(weights), [])))
    process(runner)


def by_reload_from_disk(runner, weights, path):
    runner.reload_weights(weights_path=str(path))


@torch.no_grad()  # vLLM's own calls fail without
def by_reload_in_place(runner, weights, path):
    """In the kernels' format: written to the parameters with no loader."""
    held = {name: parameter.detach().clone() for name, parameter in runner.model.named_parameters()}
    by_load_weights(runner, weights, path)
    loaded = {name: parameter.detach().clone() for name, parameter in runner.model.named_parameters()}
    runner.reload_weights(weights_iterator=iter(held.items()), is_checkpoint_format=False)
    runner._dummy_run(2)  # packs the old ones
    runner.reload_weights(weights_iterator=iter(loaded.items()), is_checkpoint_format=False)


WAYS = (as_verl, by_load_weights, processed_only, by_reload_from_disk, by_reload_in_place)


@torch.no_grad()
def agreement(network, tokens) -> float:
    """Share of the tokens that are drawn from transformers' distribution with the requests' own uniforms."""
    rows, length = len(PROMPTS), len(tokens[0])
    texts = torch.tensor([[*prompt, *own] for prompt, own in zip(PROMPTS, tokens, strict=True)])
    cumulative = network(texts).logits[:, 2:-1].double().softmax(-1).cumsum(-1).numpy()
    keys = np.repeat([rng_key(row, 0, "") for row in range(rows)], length)
    draws = uniforms(keys, np.tile(3 + np.arange(length), rows)).reshape(rows, length, 1)
    return float(((cumulative <= draws * cumulative[..., -1:]).sum(-1) == np.array(tokens)).mean())


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_no_weight_sync_leaves_an_old_packed_copy(tied, tmp_path, monkeypatch):
    monkeypatch.setattr(row_classes, "CACHE_FOLDER", tmp_path / "classes")
    model = save_model(tmp_path / "model", 6.0 if tied else 25.0, tied=tied)  # tied, a sharper one repeats its input
    network = model.network
    first = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    versions = ((changed(network, tmp_path / "trained"), tmp_path / "trained"), (first, model.path))
    settings = [{"seed": row, "max_tokens": 24} for row in range(len(PROMPTS))]
    with Engine(model, batch=16) as engine:
        tokens = engine.generate(PROMPTS, settings).tokens
        assert agreement(network, tokens) > 0.98
        for way in WAYS:
            for weights, path in versions:
                way(engine.runner, weights, path)
                network.load_state_dict(weights)
                before, tokens = tokens, engine.generate(PROMPTS, settings).tokens
                assert agreement(network, tokens) > 0.98 and agreement(network, before) < 0.95, (way.__name__, path)
