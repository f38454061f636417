"""A real engine, with our kernel or vLLM's packed one in all linear layers: tokens after weight syncs. With drafts they
are in test_compiled.py."""

from types import SimpleNamespace

import pytest
import torch

from tests.sam.engine.tiny_engine import Engine, save_model

pytestmark = pytest.mark.engine

PROMPTS = [[row, row + 1, 7] for row in range(12)]
SETTINGS = [{"seed": row, "max_tokens": 24} for row in range(len(PROMPTS))]


def weights_of(model) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.network.state_dict().items()}


def train(model, path) -> SimpleNamespace:
    """The same network after a few steps of something like training, saved."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.network.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    model.network.save_pretrained(path)
    return SimpleNamespace(path=str(path), network=model.network)


def sent(weights) -> list[tuple[str, torch.Tensor]]:
    """As verl sends them: without the head where it is tied."""
    is_tied = weights["lm_head.weight"].equal(weights["model.embed_tokens.weight"])
    return [(name, tensor) for name, tensor in weights.items() if not (is_tied and name == "lm_head.weight")]


def process(runner) -> None:
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    process_weights_after_loading(runner.model, runner.model_config, runner.device)


def as_verl(runner, weights, path):
    """vLLMColocateWorkerExtension.update_weights_from_ipc of verl 0.9.1: parts, then processing, once."""
    for part in (sent(weights)[::2], sent(weights)[1::2]):
        runner.model.load_weights(iter(part))
    process(runner)


def processed_only(runner, weights, path):
    """Written past `load_weights`, as verl's own quantised and buffer updates; processed then."""
    type(runner.model).load_weights(runner.model, iter(sent(weights)))
    process(runner)


def by_reload_from_disk(runner, weights, path):
    runner.reload_weights(weights_path=path)


@pytest.mark.parametrize("batch_invariant", ["auto", "off"])
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_no_weight_sync_leaves_an_old_copy(tied, batch_invariant, tmp_path):
    kernel = {"batch_invariant": batch_invariant}
    model = save_model(tmp_path / "first", 6.0 if tied else 25.0, tied=tied)  # tied, a sharper one repeats its input
    first, trained = weights_of(model), train(model, tmp_path / "trained")
    with Engine(trained, batch=16, speculation=kernel) as engine:
        expected = engine.generate(PROMPTS, SETTINGS).tokens
    with Engine(model, batch=16, speculation=kernel) as engine:
        before = engine.generate(PROMPTS, SETTINGS).tokens
        assert all(one != other for one, other in zip(before, expected, strict=True))
        for way in (as_verl, processed_only, by_reload_from_disk):
            for weights, path, tokens in ((weights_of(trained), trained.path, expected), (first, model.path, before)):
                way(engine.runner, weights, path)
                assert engine.generate(PROMPTS, SETTINGS).tokens == tokens, (way.__name__, path)
